//! The tables of a world.

use std::fmt;
use std::sync::Arc;

use coord_cluster::Handoff;
use coord_core::{ShardId, TableHeader, TableName};

/// One table.
#[derive(Clone, Debug)]
pub struct Sheet {
    /// Its name.
    pub name: TableName,
    /// Its header.
    pub header: TableHeader,
    /// How its owners change.
    pub handoff: Handoff,
}

/// All tables of a world; clones are the same.
#[derive(Clone, Debug)]
pub struct Tables(Arc<[Sheet]>);

/// One shard of one of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The table's number.
    pub table: usize,
    /// Which of its shards.
    pub shard: ShardId,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "shard {} of things-{}", self.shard, self.table)
    }
}

impl Tables {
    /// These tables, numbered in this order.
    #[must_use]
    pub fn new(sheets: Vec<Sheet>) -> Self {
        Self(sheets.into())
    }

    /// All, in order.
    pub fn sheets(&self) -> impl Iterator<Item = &Sheet> {
        self.0.iter()
    }

    /// The number of a table; none if it is not one of the world's.
    #[must_use]
    pub fn number(&self, name: &TableName) -> Option<usize> {
        self.0.iter().position(|sheet| sheet.name == *name)
    }

    /// How the owners of a place change.
    #[must_use]
    pub fn handoff(&self, place: Place) -> Handoff {
        self.0.get(place.table).map_or(Handoff::default(), |sheet| sheet.handoff)
    }
}
