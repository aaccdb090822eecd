//! The driver's pools: its own directory, and those below `pools/` in it, which an administrator makes or mounts there.
//!
//! A volume or snapshot of the driver's own pool is known by its bare id, one of another pool as `<pool>:<id>`.
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use super::{
    backend::{Pool, PoolError},
    failure::Failure,
    nodes::Nodes,
    request::is_id,
    shelf::{Shelf, make_directory},
};

const SEPARATOR: char = ':';

/// A pool and what classes call it; the driver's own has no name.
type Named = (Option<String>, Arc<Pool>);

pub(crate) struct Pools {
    own: Arc<Pool>,
    below: PathBuf,
    others: Mutex<BTreeMap<String, Arc<Pool>>>,
    pub(crate) nodes: Arc<Nodes>,
    pub(crate) groups: Shelf,
}

impl Pools {
    pub(crate) fn open(root: &Path) -> Result<Pools, PoolError> {
        let failed = |step| move |source| PoolError::Open { step, path: root.to_owned(), source };
        make_directory(root).map_err(failed("make it"))?;
        let root = root.canonicalize().map_err(failed("resolve it"))?;
        let nodes = Arc::new(Nodes::open(&root).map_err(failed("make nodes/"))?);
        let groups = Shelf::open(root.join("groups")).map_err(failed("make groups/"))?;
        let own = Arc::new(Pool::open(&root, Arc::clone(&nodes))?);
        Ok(Pools { own, below: root.join("pools"), others: Mutex::default(), nodes, groups })
    }

    pub(crate) fn root(&self) -> &Path {
        self.own.root()
    }

    /// The pool that a class names; the driver's own if it names none.
    pub(crate) fn named(&self, name: Option<&str>) -> Result<Arc<Pool>, Failure> {
        let Some(name) = name else { return Ok(Arc::clone(&self.own)) };
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = others.get(name) {
            return Ok(Arc::clone(pool));
        }
        let directory = self.below.join(name);
        if !is_id(name) || !directory.is_dir() {
            return Err(Failure::NoPool(name.to_owned()));
        }
        let pool = Arc::new(Pool::open(&directory, Arc::clone(&self.nodes)).map_err(Failure::Pool)?);
        others.insert(name.to_owned(), Arc::clone(&pool));
        Ok(pool)
    }

    /// The pool of a volume or snapshot, and its id there. An id that names no pool names nothing in the driver's own.
    pub(crate) fn of<'a>(&self, id: &'a str) -> Result<(Arc<Pool>, &'a str), Failure> {
        match id.split_once(SEPARATOR) {
            None => Ok((Arc::clone(&self.own), id)),
            Some((name, rest)) => match self.named(Some(name)) {
                Ok(pool) => Ok((pool, rest)),
                Err(Failure::NoPool(_)) => Ok((Arc::clone(&self.own), id)),
                Err(failure) => Err(failure),
            },
        }
    }

    /// The id that callers know.
    pub(crate) fn outer(pool: Option<&str>, id: &str) -> String {
        pool.map_or_else(|| id.to_owned(), |pool| format!("{pool}{SEPARATOR}{id}"))
    }

    /// The name of the pool in an id that callers know.
    pub(crate) fn name_of(outer: &str) -> Option<&str> {
        outer.split_once(SEPARATOR).map(|(pool, _)| pool)
    }

    /// All of them, the driver's own first.
    pub(crate) fn all(&self) -> Result<Vec<Named>, Failure> {
        let mut all = vec![(None, Arc::clone(&self.own))];
        let mut names: Vec<String> = std::fs::read_dir(&self.below)
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| is_id(name) && self.below.join(name).is_dir())
            .collect();
        names.sort_unstable();
        for name in names {
            let pool = self.named(Some(&name))?;
            all.push((Some(name), pool));
        }
        Ok(all)
    }

    /// Outer ids of one sort in order, those after `after` only.
    pub(crate) fn list(
        &self,
        after: &str,
        ids: impl Fn(&Pool) -> Result<Vec<String>, Failure>,
    ) -> Result<Vec<String>, Failure> {
        let mut all = Vec::new();
        for (name, pool) in self.all()? {
            all.extend(ids(&pool)?.iter().map(|id| Pools::outer(name.as_deref(), id)).filter(|id| id.as_str() > after));
        }
        all.sort_unstable();
        Ok(all)
    }

    /// Which volumes are published to each node, from all the records.
    pub(crate) fn publications(&self) -> Result<HashMap<String, HashSet<String>>, Failure> {
        let mut published: HashMap<String, HashSet<String>> = HashMap::new();
        for (name, pool) in self.all()? {
            for id in pool.list("")? {
                // One record that cannot be read must not stop the others.
                let Ok(Some(record)) = pool.peek(&id) else { continue };
                for node in record.published.into_keys() {
                    published.entry(node).or_default().insert(Pools::outer(name.as_deref(), &id));
                }
            }
        }
        Ok(published)
    }
}
