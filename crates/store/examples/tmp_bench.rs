//! tmp
use cleat_store::*;
use std::time::Instant;
fn main() {
    let rt = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let p = std::env::temp_dir().join(format!("tmpb-{}", std::process::id()));
    let _ = std::fs::remove_file(&p);
    rt.block_on(async {
        let s = EmbeddedStore::open(&p, Default::default()).unwrap();
        let mut t = vec![];
        for i in 0..2000 {
            let b = Instant::now();
            s.create(&format!("/k/{i}"), bytes::Bytes::from(vec![(i % 256) as u8; 900])).await.unwrap();
            t.push(b.elapsed());
        }
        t.sort();
        println!("store create p50 {:?} p99 {:?}", t[1000], t[1980]);
    });
    // raw redb
    let q = std::env::temp_dir().join(format!("tmpq-{}", std::process::id()));
    let db = redb::Database::builder().set_cache_size(16 << 20).create(&q).unwrap();
    const O: redb::TableDefinition<&str, &[u8]> = redb::TableDefinition::new("o");
    const M: redb::TableDefinition<&str, u64> = redb::TableDefinition::new("m");
    for two in [false, true] {
        let mut t = vec![];
        for i in 0..2000u64 {
            let b = Instant::now();
            let w = db.begin_write().unwrap();
            { let mut o = w.open_table(O).unwrap(); o.insert(format!("/k/{two}{i}").as_str(), vec![(i % 256) as u8; 900].as_slice()).unwrap();
              if two { let mut m = w.open_table(M).unwrap(); m.insert("r", i).unwrap(); } }
            w.commit().unwrap();
            t.push(b.elapsed());
        }
        t.sort();
        println!("redb two tables {two} p50 {:?} p99 {:?}", t[1000], t[1980]);
    }
    let _ = std::fs::remove_file(&p); let _ = std::fs::remove_file(&q);
}
