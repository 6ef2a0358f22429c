//! Steps of all running sequences at once, beside a manager that is told of each sequence by itself, and columns that
//! are kept by hand.
#![allow(missing_docs)]

use std::collections::BTreeSet;

use leafkv_core::running::{Column, Columns, Step};
use leafkv_core::{Config, Error, KvManager, Scope, SequenceId, TokenId};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

const BLOCK_SIZE: usize = 2;
/// It ends a sequence that minds.
const END: TokenId = 1;

/// What the caller's columns say of one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Row {
    id: SequenceId,
    prompt: usize,
    known: usize,
    computed: usize,
    limit: usize,
    last: TokenId,
    born: bool,
    ends: bool,
    watched: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Table(Vec<Row>);

impl Columns for Table {
    fn rows(&self) -> usize {
        self.0.len()
    }

    fn get(&self, column: Column, row: usize) -> usize {
        let row = &self.0[row];
        match column {
            Column::Id => row.id as usize,
            Column::Prompt => row.prompt,
            Column::Known => row.known,
            Column::Computed => row.computed,
            Column::Limit => row.limit,
            Column::Last => row.last as usize,
            Column::Born => row.born.into(),
            Column::Ends => row.ends.into(),
            Column::Watched => row.watched.into(),
        }
    }

    fn set(&mut self, column: Column, row: usize, value: usize) {
        let row = &mut self.0[row];
        match column {
            Column::Known => row.known = value,
            Column::Computed => row.computed = value,
            Column::Last => row.last = value as TokenId,
            _ => panic!("{column:?} is the caller's alone"),
        }
    }
}

/// One step: the budget, what rows wish for on top of the known tokens, who gets how many tokens, who is left out.
type Round = (usize, Option<Vec<usize>>, Vec<(usize, Vec<TokenId>)>, Index);

fn rounds() -> impl Strategy<Value = Vec<Round>> {
    let given = (0..4_usize, vec(0..3 as TokenId, 0..3));
    let round = (
        0..12_usize,
        proptest::option::of(vec(0..3_usize, 5)),
        vec(given, 5),
        any::<Index>(),
    );
    vec(round, 1..12)
}

/// The prompt, whether there is such a sequence, whether it minds the end, whether it is watched, its limit.
type Life = (Vec<TokenId>, bool, bool, bool, usize);

fn lives() -> impl Strategy<Value = Vec<Life>> {
    let born = prop::bool::weighted(0.8);
    let watched = prop::bool::weighted(0.2);
    vec(
        (
            vec(0..2 as TokenId, 1..7),
            born,
            any::<bool>(),
            watched,
            0..9_usize,
        ),
        1..6,
    )
}

/// Two managers in the same state, and the columns of their sequences.
fn begin(num_blocks: usize, lives: &[Life]) -> (KvManager, KvManager, Table) {
    let new = || KvManager::new(Config::new(num_blocks, BLOCK_SIZE)).unwrap();
    let (mut whole, mut single) = (new(), new());
    let mut table = Table(Vec::new());
    for (index, (prompt, born, ends, watched, more)) in lives.iter().enumerate() {
        let id = 7 * index as SequenceId;
        if *born {
            for manager in [&mut whole, &mut single] {
                // Without waiting for each other: they are to compete.
                manager
                    .begin_uncached(id, prompt.clone(), Scope::default())
                    .unwrap();
            }
        }
        table.0.push(Row {
            id,
            prompt: prompt.len(),
            known: prompt.len(),
            computed: 0,
            limit: prompt.len() + more,
            last: *prompt.last().unwrap(),
            born: *born,
            ends: *ends,
            watched: *watched,
        });
    }
    (whole, single, table)
}

/// The shares of a step, worked out row by row on the other manager.
fn grow_each(
    single: &mut KvManager,
    table: &Table,
    budget: usize,
    wishes: Option<&[usize]>,
) -> (Vec<usize>, Vec<usize>) {
    let mut left = budget;
    let mut lacking = Vec::new();
    let counts = table.0.iter().enumerate().map(|(index, row)| {
        let wish = wishes.map_or(row.known - row.computed, |wishes| wishes[index]);
        let n = if row.born { wish.min(left) } else { 0 };
        left -= n;
        lacking.push(0);
        if n > 0 {
            match single.grow(row.id, n) {
                Ok(()) => {}
                Err(Error::OutOfBlocks {
                    needed,
                    allocatable,
                }) => *lacking.last_mut().unwrap() = needed - allocatable,
                Err(other) => panic!("{other}"),
            }
        }
        n
    });
    (counts.collect(), lacking)
}

fn check_same(whole: &KvManager, single: &KvManager, table: &Table) {
    for manager in [whole, single] {
        manager.check_invariants().unwrap();
    }
    assert_eq!(whole.stats(), single.stats());
    for row in table.0.iter().filter(|row| row.born) {
        assert_eq!(whole.tokens(row.id), single.tokens(row.id));
        assert_eq!(whole.block_table(row.id), single.block_table(row.id));
        assert_eq!(whole.num_committed(row.id), Ok(row.computed));
        let tokens = whole.tokens(row.id).unwrap();
        assert_eq!((tokens.len(), tokens.last()), (row.known, Some(&row.last)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_step_of_all_is_one_of_each(num_blocks in 4..16_usize, lives in lives(), rounds in rounds()) {
        let (mut whole, mut single, mut table) = begin(num_blocks, &lives);
        for (budget, extra, given, left_out) in rounds {
            let wishes: Option<Vec<_>> = extra.map(|extra| {
                let rows = table.0.iter().zip(extra);
                rows.map(|(row, extra)| row.known - row.computed + extra).collect()
            });
            let (mut counts, mut lacking) = (vec![9; 9], vec![9; 9]);
            let shares = whole.grow_running(&table, budget, wishes.as_deref(), &mut counts, &mut lacking).unwrap();
            let expected = grow_each(&mut single, &table, budget, wishes.as_deref());
            prop_assert_eq!((&counts, &lacking), (&expected.0, &expected.1));
            let has_some = |row: &usize| counts[*row] > 0;
            let rows = 0..table.0.len();
            prop_assert_eq!(shares.lacking, lacking.iter().filter(|&&n| n > 0).count());
            prop_assert_eq!(shares.everybody, rows.clone().all(|row| has_some(&row)));
            let of_prompt = |row: &usize| table.0[*row].computed < table.0[*row].prompt;
            prop_assert_eq!(shares.prompts, rows.clone().filter(has_some).any(|row| of_prompt(&row)));

            // Those who have slots commit some of them, unless they are left out, and get tokens once all is computed.
            let out = left_out.index(table.0.len());
            let rows: Vec<_> = rows.filter(|&row| has_some(&row) && lacking[row] == 0 && row != out).collect();
            let (mut counted, mut new_tokens, mut new_counts) = (Vec::new(), Vec::new(), Vec::new());
            let mut looks = BTreeSet::new();
            let mut expected = table.clone();
            for (item, &index) in rows.iter().enumerate() {
                let (rejected, tokens) = &given[index];
                let row = &mut expected.0[index];
                let count = counts[index].saturating_sub(*rejected).min(row.known - row.computed);
                let tokens = if row.computed + count == row.known { tokens.as_slice() } else { &[] };
                single.commit(row.id, row.computed + count, tokens).unwrap();
                row.computed += count;
                if let Some(&last) = tokens.last() {
                    let first = row.known == row.prompt;
                    row.known += tokens.len();
                    row.last = last;
                    let may_end = row.known >= row.limit || (last == END && row.ends);
                    if row.watched || tokens.len() > 1 || first || may_end {
                        looks.insert(item);
                    }
                }
                counted.push(count);
                new_tokens.extend_from_slice(tokens);
                new_counts.push(tokens.len());
            }
            let all = rows.len() == table.0.len();
            let step = Step {
                rows: (!all).then_some(rows.as_slice()),
                counts: &counted,
                new_tokens: &new_tokens,
                new_counts: &new_counts,
            };
            let mut looked = Vec::new();
            whole.commit_running(&mut table, step, &[END, 99], |item| looked.push(item)).unwrap();
            prop_assert_eq!(looked, looks.into_iter().collect::<Vec<_>>());
            prop_assert_eq!(&table, &expected);
            for row in table.0.iter().filter(|row| row.born) {
                for manager in [&mut whole, &mut single] {
                    manager.truncate(row.id, row.computed).unwrap();
                }
            }
            check_same(&whole, &single, &table);
        }
    }
}

#[test]
fn what_is_wrong_changes_nothing() {
    let lives = [
        (vec![0, 1, 0], true, true, false, 5),
        (vec![1, 1], true, true, true, 5),
    ];
    let (mut whole, single, mut table) = begin(9, &lives);
    let (mut counts, mut lacking) = (Vec::new(), Vec::new());
    let mut refused = |table: &Table, wishes: Option<&[usize]>, argument: &str| {
        let error = whole
            .grow_running(table, 9, wishes, &mut counts, &mut lacking)
            .unwrap_err();
        assert!(error.to_string().contains(argument), "{error}");
    };
    refused(
        &table,
        Some(&[1]),
        "wishes: got 1, expected one for each of 2 rows",
    );
    let mut other = table.clone();
    other.0[1].id = 5;
    refused(&other, None, "5");
    other.0[1].id = 0;
    refused(&other, None, "there twice");
    let before = table.clone();
    for (rows, counts, new_tokens, new_counts, argument) in [
        (
            Some(vec![2]),
            vec![0],
            vec![],
            vec![0],
            "rows: got row 2, expected less than 2",
        ),
        (None, vec![0], vec![], vec![0, 0], "counts"),
        (None, vec![0, 0], vec![4], vec![0, 0], "new_counts"),
        (None, vec![0, 1], vec![], vec![0, 0], "counts: item 1"),
        (
            Some(vec![1, 1]),
            vec![0, 0],
            vec![],
            vec![0, 0],
            "there twice",
        ),
    ] {
        let step = Step {
            rows: rows.as_deref(),
            counts: &counts,
            new_tokens: &new_tokens,
            new_counts: &new_counts,
        };
        let error = whole.commit_running(&mut table, step, &[], |_| panic!("nothing to look at"));
        let error = error.unwrap_err().to_string();
        assert!(error.contains(argument), "{error}");
        assert_eq!(table, before);
    }
    check_same(&whole, &single, &table);
}
