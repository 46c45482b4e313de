//! What a sector may hold after a loss of power, given the answers that clients got.
//!
//! A write is durable once it was answered with FUA, or once a flush was answered that was sent after the
//! answer to the write, on any connection. The contents of a sector before a durable write was sent must not
//! come back.

use std::ops::Range;

/// A client's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Writes a number of its own into these sectors, or zeroes (0); true: with FUA.
    Write(Range<usize>, u64, bool),
    /// These sectors may become zero.
    Trim(Range<usize>),
    Flush,
}

#[derive(Debug)]
struct Asked {
    kind: Kind,
    asked: u64,
    answered: Option<u64>,
    durable: bool,
}

impl Asked {
    fn sectors(&self) -> Range<usize> {
        match &self.kind {
            Kind::Write(sectors, ..) | Kind::Trim(sectors) => sectors.clone(),
            Kind::Flush => 0..0,
        }
    }

    fn value(&self) -> Option<u64> {
        match self.kind {
            Kind::Write(_, value, _) => Some(value),
            Kind::Trim(_) => Some(0),
            Kind::Flush => None,
        }
    }
}

/// All requests and answers.
#[derive(Debug, Default)]
pub(crate) struct Model {
    all: Vec<Asked>,
    clock: u64,
}

impl Model {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Adds a request and returns its number.
    pub(crate) fn ask(&mut self, kind: Kind) -> usize {
        let asked = self.tick();
        self.all.push(Asked { kind, asked, answered: None, durable: false });
        self.all.len() - 1
    }

    /// Notes that a request was answered with success.
    pub(crate) fn answer(&mut self, number: usize) {
        let now = self.tick();
        self.all[number].answered = Some(now);
        match self.all[number].kind {
            Kind::Write(_, _, fua) => self.all[number].durable |= fua,
            Kind::Trim(_) => {}
            Kind::Flush => {
                let asked = self.all[number].asked;
                for other in &mut self.all {
                    let covered = other.answered.is_some_and(|answered| answered < asked);
                    other.durable |= covered && matches!(other.kind, Kind::Write(..));
                }
            }
        }
    }

    /// Checks the contents after a loss of power.
    pub(crate) fn check(&self, image: &[u64]) -> Result<(), String> {
        for (sector, value) in image.iter().enumerate() {
            let here: Vec<&Asked> =
                self.all.iter().filter(|asked| asked.sectors().contains(&sector)).collect();
            // A durable write that was sent after this one was answered.
            let replaced = |answered: Option<u64>| {
                here.iter()
                    .find(|other| other.durable && answered.is_some_and(|at| at < other.asked))
            };
            let mut why = (*value == 0).then(|| replaced(Some(0)));
            for asked in here.iter().filter(|asked| asked.value() == Some(*value)) {
                let replaced = replaced(asked.answered);
                if why.flatten().is_some() || why.is_none() {
                    why = Some(replaced);
                }
            }
            match why {
                Some(None) => {}
                Some(Some(durable)) => {
                    return Err(format!("sector {sector}: {value}, but {durable:?}"));
                }
                None => return Err(format!("sector {sector}: {value}, which nobody wrote")),
            }
        }
        Ok(())
    }
}

#[test]
fn the_model_knows_right_from_wrong() {
    let mut model = Model::default();
    let one = model.ask(Kind::Write(0..2, 1, false));
    assert!(model.check(&[1, 0]).is_ok(), "under way: any part");
    model.answer(one);
    assert!(model.check(&[0, 1]).is_ok(), "not flushed: any part");
    assert!(model.check(&[2, 1]).is_err(), "nobody wrote that");
    let flush = model.ask(Kind::Flush);
    let two = model.ask(Kind::Write(1..2, 2, false));
    model.answer(two);
    model.answer(flush);
    assert!(model.check(&[1, 1]).is_ok() && model.check(&[1, 2]).is_ok());
    assert!(model.check(&[0, 2]).is_err() && model.check(&[1, 0]).is_err(), "flushed");
    let three = model.ask(Kind::Write(0..1, 3, true));
    assert!(model.check(&[1, 1]).is_ok() && model.check(&[3, 1]).is_ok());
    model.answer(three);
    assert!(model.check(&[1, 2]).is_err() && model.check(&[3, 1]).is_ok(), "FUA");
    let trim = model.ask(Kind::Trim(0..1));
    assert!(model.check(&[0, 1]).is_ok() && model.check(&[3, 1]).is_ok());
    model.answer(trim);
    assert!(model.check(&[0, 1]).is_ok() && model.check(&[3, 1]).is_ok());
    assert!(model.check(&[1, 1]).is_err(), "a trim brings nothing back");
}
