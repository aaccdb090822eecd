//! The pools of the driver: the default pool, and the named pools below `pools/` in it, which an administrator creates
//! or mounts there.
//!
//! The CSI id of a volume or snapshot is `<id>` in the default pool, and `<pool>:<id>` in a named pool.
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use super::{
    failure::{Failure, PoolError},
    node_registry::{NodeRegistry, VolumesByNode},
    pool::Pool,
    records::{RecordDir, ensure_directory},
    request::is_id,
};

const POOL_SEPARATOR: char = ':';

/// A pool with its name; the default pool has none.
type NamedPool = (Option<String>, Arc<Pool>);

pub(crate) struct Pools {
    default_pool: Arc<Pool>,
    named_pool_dir: PathBuf,
    /// The named pools that have been opened.
    named_pools: Mutex<BTreeMap<String, Arc<Pool>>>,
    pub(crate) nodes: Arc<NodeRegistry>,
    pub(crate) groups: RecordDir,
}

impl Pools {
    pub(crate) fn open(root: &Path) -> Result<Pools, PoolError> {
        let failed = |step| move |source| PoolError::Open { step, path: root.to_owned(), source };
        ensure_directory(root).map_err(failed("make it"))?;
        let root = root.canonicalize().map_err(failed("resolve it"))?;
        let nodes = Arc::new(NodeRegistry::open(&root).map_err(failed("make nodes/"))?);
        let groups = RecordDir::open(root.join("groups")).map_err(failed("make groups/"))?;
        let default_pool = Arc::new(Pool::open(&root, Arc::clone(&nodes))?);
        let named_pool_dir = root.join("pools");
        Ok(Pools { default_pool, named_pool_dir, named_pools: Mutex::default(), nodes, groups })
    }

    pub(crate) fn root(&self) -> &Path {
        self.default_pool.root()
    }

    /// The pool with this name, or the default pool. Opens the pool at its first use.
    pub(crate) fn by_name(&self, name: Option<&str>) -> Result<Arc<Pool>, Failure> {
        let Some(name) = name else { return Ok(Arc::clone(&self.default_pool)) };
        let mut named_pools = self.named_pools.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = named_pools.get(name) {
            return Ok(Arc::clone(pool));
        }
        let directory = self.named_pool_dir.join(name);
        if !is_id(name) || !directory.is_dir() {
            return Err(Failure::PoolNotFound(name.to_owned()));
        }
        let pool = Arc::new(Pool::open(&directory, Arc::clone(&self.nodes)).map_err(Failure::Pool)?);
        named_pools.insert(name.to_owned(), Arc::clone(&pool));
        Ok(pool)
    }

    /// The pool of a CSI id, and the id in that pool. An id with an unknown pool is resolved to the default pool, where
    /// it is not found: ids there contain no separator.
    pub(crate) fn resolve<'a>(&self, id: &'a str) -> Result<(Arc<Pool>, &'a str), Failure> {
        match id.split_once(POOL_SEPARATOR) {
            None => Ok((Arc::clone(&self.default_pool), id)),
            Some((name, rest)) => match self.by_name(Some(name)) {
                Ok(pool) => Ok((pool, rest)),
                Err(Failure::PoolNotFound(_)) => Ok((Arc::clone(&self.default_pool), id)),
                Err(failure) => Err(failure),
            },
        }
    }

    /// The CSI id of a volume or snapshot.
    pub(crate) fn csi_id(pool: Option<&str>, id: &str) -> String {
        pool.map_or_else(|| id.to_owned(), |pool| format!("{pool}{POOL_SEPARATOR}{id}"))
    }

    /// The name of the pool in a CSI id.
    pub(crate) fn pool_name(csi_id: &str) -> Option<&str> {
        csi_id.split_once(POOL_SEPARATOR).map(|(pool, _)| pool)
    }

    /// All pools, the default pool first, then by name.
    pub(crate) fn all(&self) -> Result<Vec<NamedPool>, Failure> {
        let mut all = vec![(None, Arc::clone(&self.default_pool))];
        let mut names: Vec<String> = std::fs::read_dir(&self.named_pool_dir)
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| is_id(name) && self.named_pool_dir.join(name).is_dir())
            .collect();
        names.sort_unstable();
        for name in names {
            let pool = self.by_name(Some(&name))?;
            all.push((Some(name), pool));
        }
        Ok(all)
    }

    /// The CSI ids of the objects that `ids` lists in each pool, those greater than `after` only, in ascending order.
    pub(crate) fn list_ids(
        &self,
        after: &str,
        ids: impl Fn(&Pool) -> Result<Vec<String>, Failure>,
    ) -> Result<Vec<String>, Failure> {
        let mut all = Vec::new();
        for (name, pool) in self.all()? {
            all.extend(
                ids(&pool)?.iter().map(|id| Pools::csi_id(name.as_deref(), id)).filter(|id| id.as_str() > after),
            );
        }
        all.sort_unstable();
        Ok(all)
    }

    /// Reads from all records which volumes are published to each node.
    pub(crate) fn volumes_by_node(&self) -> Result<VolumesByNode, Failure> {
        let mut published = VolumesByNode::new();
        for (name, pool) in self.all()? {
            for id in pool.list("")? {
                // A record that cannot be read must not prevent publications of other volumes.
                let Ok(Some(record)) = pool.read_record(&id) else { continue };
                for node in record.published.into_keys() {
                    published.entry(node).or_default().insert(Pools::csi_id(name.as_deref(), &id));
                }
            }
        }
        Ok(published)
    }
}
