//! Rows of block tables as a caller keeps them, and what was written to them.

use std::collections::BTreeMap;

use leafkv_core::{BlockId, KvManager, Result, SequenceId};

pub const ROWS: usize = 6;
pub const COLUMNS: usize = 20;
/// What no table has in it.
const UNTOUCHED: BlockId = BlockId::MAX;

#[derive(Debug, Clone)]
struct Row {
    stamp: u64,
    entries: [BlockId; COLUMNS],
}

/// Some rows, and of which sequence each stamp is.
#[derive(Debug)]
pub struct Rows {
    rows: Vec<Row>,
    owners: BTreeMap<u64, SequenceId>,
    /// What became of the table since its stamp was given.
    since: BTreeMap<SequenceId, Since>,
}

#[derive(Debug, Clone, Copy)]
struct Since {
    stamp: u64,
    /// Up to here it stayed as it was.
    kept: usize,
    /// Whether an entry became another, instead of entries coming and going.
    replaced: bool,
}

/// One call: which rows it is about, and what was written to each.
struct Call<'a> {
    rows: &'a mut Rows,
    order: Vec<usize>,
    ids: &'a [SequenceId],
    written: Vec<Option<usize>>,
}

impl leafkv_core::Rows for Call<'_> {
    fn stamp(&self, row: usize) -> u64 {
        self.rows.rows[self.order[row]].stamp
    }

    fn write(&mut self, row: usize, column: usize, blocks: &[BlockId], stamp: u64) {
        let Self {
            rows,
            order,
            ids,
            written,
        } = self;
        let target = &mut rows.rows[order[row]];
        target.entries[column..column + blocks.len()].copy_from_slice(blocks);
        target.entries[column + blocks.len()..].fill(UNTOUCHED);
        target.stamp = stamp;
        assert!(
            stamp != 0 && rows.owners.insert(stamp, ids[row]).is_none(),
            "stamp {stamp} is given again"
        );
        let since = Since {
            stamp,
            kept: column + blocks.len(),
            replaced: false,
        };
        rows.since.insert(ids[row], since);
        assert!(
            written[row].replace(column).is_none(),
            "row {row} is written twice"
        );
    }
}

impl Rows {
    pub fn new() -> Self {
        let row = Row {
            stamp: 0,
            entries: [UNTOUCHED; COLUMNS],
        };
        Self {
            rows: vec![row; ROWS],
            owners: BTreeMap::new(),
            since: BTreeMap::new(),
        }
    }

    /// A table changed from one thing to another, or came, or went.
    pub fn table_changed(
        &mut self,
        id: SequenceId,
        before: Option<&[BlockId]>,
        now: Option<&[BlockId]>,
    ) {
        match (before, now) {
            (Some(before), Some(now)) => {
                let same = before.iter().zip(now).take_while(|(a, b)| a == b).count();
                if let Some(since) = self.since.get_mut(&id) {
                    since.kept = same.min(since.kept);
                    since.replaced |= same < before.len().min(now.len());
                }
            }
            _ => {
                self.since.remove(&id);
            }
        }
    }

    /// What a caller may do to rows between two calls. Returns whether anything was done.
    pub fn spoil(&mut self, how: u8, items: &[(SequenceId, usize)]) {
        let Some(&(id, row)) = items.first() else {
            return;
        };
        let other = (row + 1 + usize::from(how) % (ROWS - 1)) % ROWS;
        match how % 8 {
            // Row and stamp move together.
            0 => self.rows.swap(row, other),
            // Content unknown.
            1 => {
                self.rows[row].stamp = 0;
                self.rows[row].entries.fill(77);
            }
            // Another sequence's stamp, or one that nobody gave.
            2 if self.owners.get(&self.rows[other].stamp) != Some(&id) => {
                self.rows[row].stamp = self.rows[other].stamp;
                self.rows[row].entries.fill(78);
            }
            3 => {
                self.rows[row].stamp = u64::MAX - u64::from(how);
                self.rows[row].entries.fill(79);
            }
            _ => (),
        }
    }

    /// Has the manager bring rows up to date, and compares them with the tables. True: only what changed was written.
    pub fn update(
        &mut self,
        manager: &mut KvManager,
        items: &[(SequenceId, usize)],
        columns: usize,
    ) -> Result<bool> {
        let ids: Vec<SequenceId> = items.iter().map(|&(id, _)| id).collect();
        let before = items.iter().map(|&(id, row)| {
            let since = self.since.get(&id)?;
            (since.stamp == self.rows[row].stamp).then_some(*since)
        });
        let before: Vec<Option<Since>> = before.collect();
        let mut call = Call {
            rows: self,
            order: items.iter().map(|&(_, row)| row).collect(),
            ids: &ids,
            written: vec![None; items.len()],
        };
        if let Err(error) = manager.update_rows(&ids, columns, &mut call) {
            // Nobody keeps a wrong stamp for later.
            self.rows[items[0].1].stamp = 0;
            return Err(error);
        }
        let written = call.written;
        let mut incremental = false;
        for (index, &(id, row)) in items.iter().enumerate() {
            let table = manager.block_table(id)?;
            assert_eq!(
                &self.rows[row].entries[..table.len()],
                table,
                "row {row} of sequence {id}"
            );
            if ids.iter().filter(|&&other| other == id).count() > 1 {
                continue; // Stamps were renewed within the call.
            }
            match (before[index], written[index]) {
                (Some(since), Some(from)) => {
                    let right = from == since.kept || (since.replaced && from < since.kept);
                    assert!(right && from < table.len(), "{from}, {since:?}: {table:?}");
                    incremental |= from > 0;
                }
                (Some(since), None) => assert!(since.kept >= table.len()),
                (None, from) => assert_eq!(from, Some(0), "sequence {id} is new in row {row}"),
            }
        }
        Ok(incremental)
    }
}
