//! The arguments `namespace` and `media`: what KV depends on besides the tokens.

use leafkv_core::{Digest, Media, Scope};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PySequence};

use crate::error::invalid;
use crate::int::{integer, show, unlike};

/// An argument named `namespace`: bytes.
pub(crate) struct Namespace<'a>(pub(crate) &'a [u8]);

impl<'a, 'py> FromPyObject<'a, 'py> for Namespace<'a> {
    type Error = PyErr;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        match value.extract() {
            Ok(bytes) => Ok(Self(bytes)),
            Err(_) => Err(unlike("namespace", &value, "bytes")),
        }
    }
}

impl<'a> Namespace<'a> {
    pub(crate) fn with(&self, media: &'a [Media]) -> Scope<'a> {
        Scope {
            namespace: self.0,
            media,
        }
    }
}

/// An argument named `media`: a sequence of `(start, length, digest)`.
pub(crate) fn media(value: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<Media>> {
    let Some(value) = value else {
        return Ok(Vec::new());
    };
    let Ok(spans) = value.cast::<PySequence>() else {
        let expected = "a sequence of (start, length, digest)";
        return Err(unlike("media", value, expected));
    };
    let spans = spans.try_iter()?.enumerate();
    spans.map(|(index, item)| span(index, &item?)).collect()
}

fn span(index: usize, item: &Bound<'_, PyAny>) -> PyResult<Media> {
    let wrong = |problem: String| invalid("media", format!("span {index} {problem}"));
    type Parts<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);
    let Ok((start, length, digest)) = item.extract::<Parts<'_>>() else {
        let got = show(item);
        return Err(wrong(format!(
            "is {got}, expected a tuple (start, length, digest)"
        )));
    };
    let position = |name: &str, value: &Bound<'_, PyAny>| {
        let number = integer(value).and_then(|number| usize::try_from(number).ok());
        let problem = || format!("has {name} {}, expected an int >= 0", show(value));
        number.ok_or_else(|| wrong(problem()))
    };
    let (start, length) = (position("start", &start)?, position("length", &length)?);
    let digest = to_digest(&digest).map_err(|got| wrong(format!("has digest {got}")))?;
    Ok(Media {
        start,
        length,
        digest,
    })
}

/// A digest, or what came and what was expected.
pub(crate) fn to_digest(value: &Bound<'_, PyAny>) -> Result<Digest, String> {
    let got = match value.cast::<PyBytes>().map(|bytes| bytes.as_bytes()) {
        Ok(bytes) => match bytes.try_into() {
            Ok(digest) => return Ok(digest),
            Err(_) => format!("of {} bytes", bytes.len()),
        },
        Err(_) => show(value),
    };
    Err(format!("{got}, expected 32 bytes"))
}
