//! The newest maps that went through a handle, so that a change is read and written as the little that
//! it is.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

use super::{ChunkKey, EncodedMap, Manifest, TableHeadV1, WireLimits, encode_map, encode_next};
use crate::error::Result;
use crate::types::{ShardMap, TableName, Version};

/// Of how many tables the newest map is kept.
const TABLES_MAX: usize = 64;

/// The newest maps of a handle's tables. They are a help only: whatever stands here, a map is what its
/// manifest says, or `Corrupt`.
#[derive(Clone, Default)]
pub struct KnownMaps(Arc<Mutex<HashMap<TableName, Known>>>);

struct Known {
    manifest: Manifest,
    map: Arc<ShardMap>,
    /// Whether the store certainly holds no chunk of the table.
    is_swept: bool,
}

/// The chunks that a map is put together from.
#[derive(Debug)]
pub struct Fetch {
    /// Where they are stored.
    pub keys: Vec<ChunkKey>,
    base: Option<Arc<ShardMap>>,
}

impl KnownMaps {
    /// The map that a head speaks of.
    ///
    /// # Errors
    /// The chunks that have to be fetched, for [`assemble`](Self::assemble).
    pub fn read(&self, head: &TableHeadV1) -> Result<Arc<ShardMap>, Fetch> {
        let Some(manifest) = &head.manifest else {
            return Ok(Arc::new(ShardMap::empty(head.header.clone(), head.uid)));
        };
        let base = match self.lock().get(&head.table) {
            Some(known) if known.manifest == *manifest => {
                return Ok(Arc::clone(&known.map));
            }
            known => known.map(|known| Arc::clone(&known.map)),
        };
        Err(Fetch { keys: manifest.needed(base.as_deref()), base })
    }

    /// Puts a map together, and remembers it.
    ///
    /// # Errors
    /// `Corrupt`, as [`Manifest::assemble`] says.
    pub fn assemble(
        &self,
        head: &TableHeadV1,
        fetch: &Fetch,
        chunks: &HashMap<ChunkKey, Bytes>,
    ) -> Result<Arc<ShardMap>> {
        let Some(manifest) = &head.manifest else {
            return Ok(Arc::new(ShardMap::empty(head.header.clone(), head.uid)));
        };
        let map = Arc::new(manifest.assemble(fetch.base.as_deref(), chunks)?);
        self.remember(&head.table, manifest, &map, false);
        Ok(map)
    }

    /// The next map, as a difference from the stored one where this handle knows that.
    ///
    /// # Errors
    /// As [`encode_map`].
    pub fn encode(
        &self,
        head: &TableHeadV1,
        map: &ShardMap,
        limits: WireLimits,
    ) -> Result<EncodedMap> {
        let Some(manifest) = &head.manifest else { return encode_map(map, limits) };
        let known = self
            .lock()
            .get(&head.table)
            .and_then(|known| (known.manifest == *manifest).then(|| Arc::clone(&known.map)));
        match known {
            Some(known) => encode_next(manifest, &known, map, limits),
            None => encode_map(map, limits),
        }
    }

    /// Remembers a map that was published. Tells whether chunks of earlier maps may be stored, that have
    /// to be removed.
    #[must_use]
    pub fn published(&self, table: &TableName, manifest: &Manifest, map: &Arc<ShardMap>) -> bool {
        let was_swept = self.lock().get(table).is_some_and(|known| known.is_swept);
        let is_swept = was_swept && manifest.keys().next().is_none();
        self.remember(table, manifest, map, is_swept);
        !is_swept
    }

    /// The store holds no chunk of a table, as it was found after this version.
    pub fn swept(&self, table: &TableName, version: Version) {
        if let Some(known) = self.lock().get_mut(table)
            && known.manifest.version() == version
        {
            known.is_swept = true;
        }
    }

    /// Remembers a map, unless a newer one is known. Another life of the table, or another map of the
    /// same version, is always the news: the store has gone back.
    fn remember(
        &self,
        table: &TableName,
        manifest: &Manifest,
        map: &Arc<ShardMap>,
        is_swept: bool,
    ) {
        let mut maps = self.lock();
        if let Some(known) = maps.get(table)
            && known.map.uid() == map.uid()
            && known.map.version() > map.version()
        {
            return;
        }
        if maps.len() >= TABLES_MAX && !maps.contains_key(table) {
            maps.clear();
        }
        let known = Known { manifest: manifest.clone(), map: Arc::clone(map), is_swept };
        maps.insert(table.clone(), known);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<TableName, Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for KnownMaps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KnownMaps").finish_non_exhaustive()
    }
}
