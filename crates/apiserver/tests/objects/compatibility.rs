//! Behaviour of objects, lists and watches that clients depend on and that incompatible API servers often get wrong.

use std::collections::BTreeSet;

use cleat_apiserver::{ApiServer, Config};
use futures::future::join_all;
use serde_json::{Value, json};

use crate::test_api::{TestApi, causes, map, start, version};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const CLAIMS: &str = "/api/v1/namespaces/default/persistentvolumeclaims";

fn claim(name: &str, size: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": name },
        "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": size } } },
    })
}

#[tokio::test]
async fn a_write_that_changes_nothing_keeps_the_version_and_sends_no_event() {
    let api = start().await;
    let created = api.create(MAPS, map("a")).await;
    let path = format!("{MAPS}/a");
    let (_, put) = api.put(&path, created.clone()).await;
    let (_, patched) = api.patch(&path, json!({ "data": { "k": "v" } })).await;
    assert_eq!((version(&put), version(&patched)), (version(&created), version(&created)));
    let mut watch = api.watch(&format!("{MAPS}?watch=1&resourceVersion={}", version(&created))).await;
    api.patch(&path, json!({ "data": { "k": "w" } })).await;
    assert_eq!(watch.next().await.unwrap()["object"]["data"]["k"], "w", "the first event is the first change");
}

#[tokio::test]
async fn no_event_is_lost_between_a_list_and_the_watch_from_its_version() {
    let api = start().await;
    let names: Vec<String> = (0..60).map(|i| format!("m{i:02}")).collect();
    let writes = join_all(names.iter().map(|name| api.create(MAPS, map(name))));
    let reads = async {
        let (_, list) = api.get(MAPS).await;
        let mut observed: BTreeSet<String> =
            list["items"].as_array().unwrap().iter().map(|o| o["metadata"]["name"].as_str().unwrap().into()).collect();
        let mut watch = api.watch(&format!("{MAPS}?watch=1&resourceVersion={}", version(&list))).await;
        while observed.len() < names.len() {
            let event = watch.next().await.unwrap();
            let name = event["object"]["metadata"]["name"].as_str().unwrap().to_owned();
            assert!(observed.insert(name), "each object is reported once");
        }
        observed
    };
    let (_, observed) = tokio::join!(writes, reads);
    assert_eq!(observed, names.into_iter().collect());
}

#[tokio::test]
async fn resource_versions_are_positive_numbers_also_of_empty_lists() {
    let api = start().await;
    let check = |value: &Value| {
        let text = value["metadata"]["resourceVersion"].as_str().unwrap_or_default().to_owned();
        assert!(text.bytes().all(|b| b.is_ascii_digit()) && !text.starts_with('0') && !text.is_empty(), "{text:?}");
    };
    check(&api.get("/apis/coordination.k8s.io/v1/leases").await.1);
    check(&api.create(MAPS, map("a")).await);
    let path = format!("{MAPS}?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=1");
    let mut watch = api.watch(&path).await;
    for _ in 0..2 {
        check(&watch.next().await.unwrap()["object"]);
    }
}

#[tokio::test]
async fn a_deletion_has_its_own_resource_version() {
    let api = start().await;
    let created = api.create(MAPS, map("a")).await;
    let mut watch = api.watch(&format!("{MAPS}?watch=1&resourceVersion={}", version(&created))).await;
    api.delete(&format!("{MAPS}/a")).await;
    let deleted = watch.next().await.unwrap();
    assert_eq!(deleted["type"], "DELETED");
    assert!(version(&deleted["object"]) > version(&created));
    let mut resumed = api.watch(&format!("{MAPS}?watch=1&resourceVersion={}", version(&deleted["object"]))).await;
    api.create(MAPS, map("b")).await;
    let next = resumed.next().await.unwrap();
    assert_eq!((next["type"].as_str(), &next["object"]["metadata"]["name"]), (Some("ADDED"), &json!("b")));
}

#[tokio::test]
async fn an_object_that_stops_matching_a_selector_is_deleted_for_its_watches() {
    let api = start().await;
    let mut labelled = map("a");
    labelled["metadata"]["labels"] = json!({ "a": "b" });
    let created = api.create(MAPS, labelled).await;
    let path = format!("{MAPS}?watch=1&labelSelector=a%3Db&resourceVersion={}", version(&created));
    let mut watch = api.watch(&path).await;
    let (_, after) = api.patch(&format!("{MAPS}/a"), json!({ "metadata": { "labels": { "a": "c" } } })).await;
    let event = watch.next().await.unwrap();
    assert_eq!((event["type"].as_str(), &event["object"]["metadata"]["labels"]["a"]), (Some("DELETED"), &json!("b")));
    assert_eq!(version(&event["object"]), version(&after), "the old object at the version of the change");
}

#[tokio::test]
async fn a_watch_from_version_zero_starts_with_the_existing_objects() {
    let api = start().await;
    api.create(MAPS, map("a")).await;
    let mut watch = api.watch(&format!("{MAPS}?watch=1&resourceVersion=0&fieldSelector=metadata.name%3Da")).await;
    assert_eq!(watch.next().await.unwrap()["type"], "ADDED");
}

#[tokio::test]
async fn exactly_one_client_wins_a_lease() {
    let api = start().await;
    let leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
    let lease = |holder: String| json!({ "metadata": { "name": "l" }, "spec": { "holderIdentity": holder } });
    let tries = join_all((0..16).map(|i| api.post(leases, lease(i.to_string())))).await;
    assert_eq!(tries.iter().filter(|(code, _)| *code == 201).count(), 1);
    let loser = tries.iter().find(|(code, _)| *code != 201).unwrap();
    assert_eq!((loser.0, loser.1["reason"].as_str()), (409, Some("AlreadyExists")));
    let (_, current) = api.get(&format!("{leases}/l")).await;
    let renewals = join_all((0..16).map(|i| {
        let mut renewal = current.clone();
        renewal["spec"]["holderIdentity"] = format!("next-{i}").into();
        let (api, path) = (&api, format!("{leases}/l"));
        async move { api.put(&path, renewal).await }
    }))
    .await;
    assert_eq!(renewals.iter().filter(|(code, _)| *code == 200).count(), 1);
    let loser = renewals.iter().find(|(code, _)| *code != 200).unwrap();
    assert_eq!((loser.0, loser.1["reason"].as_str()), (409, Some("Conflict")));
    assert_eq!(api.put(&format!("{leases}/l"), lease("blind".into())).await.0, 422, "a version is required");
}

#[tokio::test]
async fn deletion_returns_the_uid_of_a_removed_object_or_the_object_with_finalizers() {
    let api = start().await;
    let created = api.create(MAPS, map("a")).await;
    let (_, status) = api.delete(&format!("{MAPS}/a")).await;
    assert_eq!((status["kind"].as_str(), &status["details"]["uid"]), (Some("Status"), &created["metadata"]["uid"]));
    api.create(CLAIMS, claim("c", "1Gi")).await;
    let (_, waiting) = api.delete(&format!("{CLAIMS}/c")).await;
    assert_eq!(waiting["kind"], "PersistentVolumeClaim");
    assert_eq!(waiting["metadata"]["deletionGracePeriodSeconds"], 0);
}

#[tokio::test]
async fn a_deleted_object_goes_with_its_last_finalizer_and_accepts_no_new_one() {
    let api = start().await;
    let created = api.create(CLAIMS, claim("c", "1Gi")).await;
    let path = format!("{CLAIMS}/c");
    api.delete(&path).await;
    let more = json!({ "metadata": { "finalizers": ["kubernetes.io/pvc-protection", "example.com/late"] } });
    let (code, refused) = api.patch(&path, more).await;
    assert_eq!((code, causes(&refused)), (422, vec!["metadata.finalizers".into()]));
    let mut watch = api.watch(&format!("{CLAIMS}?watch=1&resourceVersion={}", version(&created))).await;
    assert_eq!(api.patch(&path, json!({ "metadata": { "finalizers": null } })).await.0, 200);
    assert_eq!(watch.next().await.unwrap()["type"], "MODIFIED");
    assert_eq!(watch.next().await.unwrap()["type"], "DELETED");
    assert_eq!(api.get(&path).await.0, 404);
}

#[tokio::test]
async fn a_resource_version_in_a_patch_is_a_precondition() {
    let api = start().await;
    let created = api.create(MAPS, map("a")).await;
    let path = format!("{MAPS}/a");
    api.patch(&path, json!({ "data": { "k": "w" } })).await;
    let stale = json!({ "metadata": { "resourceVersion": version(&created).to_string() }, "data": { "k": "x" } });
    let (code, refused) = api.patch(&path, stale).await;
    assert_eq!((code, refused["reason"].as_str()), (409, Some("Conflict")));
}

#[tokio::test]
async fn a_new_claim_is_pending() {
    let api = start().await;
    let mut watch = api.watch(&format!("{CLAIMS}?watch=1&resourceVersion=0")).await;
    let created = api.create(CLAIMS, claim("c", "1Gi")).await;
    assert_eq!(created["status"]["phase"], "Pending");
    assert_eq!(watch.next().await.unwrap()["object"]["status"]["phase"], "Pending");
}

#[tokio::test]
async fn an_object_can_be_written_back_without_a_change() {
    let api = start().await;
    let classes = "/apis/storage.k8s.io/v1/storageclasses";
    let drivers = "/apis/storage.k8s.io/v1/csidrivers";
    let class = json!({ "metadata": { "name": "x" }, "provisioner": "x.example.com" });
    let driver = json!({ "metadata": { "name": "x.example.com" }, "spec": {} });
    for (collection, body) in [(classes, class), (drivers, driver), (CLAIMS, claim("c", "1024Mi"))] {
        let created = api.create(collection, body.clone()).await;
        let path = format!("{collection}/{}", created["metadata"]["name"].as_str().unwrap());
        let (_, mut first) = api.patch(&path, body.clone()).await;
        if collection == CLAIMS {
            assert!(version(&first) > version(&created), "the first write of a claim stores its phase");
            first["metadata"]["resourceVersion"] = created["metadata"]["resourceVersion"].clone();
            first["metadata"]["managedFields"] = created["metadata"]["managedFields"].clone();
        }
        assert_eq!(first, created);
        let (_, now) = api.get(&path).await;
        let (code, same) = api.patch(&path, body).await;
        assert_eq!((code, version(&same)), (200, version(&now)), "{same}");
    }
    let (_, stored) = api.get(&format!("{CLAIMS}/c")).await;
    assert_eq!(stored["spec"]["resources"]["requests"]["storage"], "1Gi");
}

#[tokio::test]
async fn every_kind_supports_the_verbs_in_discovery() {
    let api = start().await;
    let (_, groups) = api.get("/apis").await;
    let mut versions = vec!["/api/v1".to_owned()];
    for group in groups["groups"].as_array().unwrap() {
        let versions_of = group["versions"].as_array().unwrap();
        versions.extend(versions_of.iter().map(|v| format!("/apis/{}", v["groupVersion"].as_str().unwrap())));
    }
    let mut checked = 0;
    for path in versions {
        let (code, resources) = api.get(&path).await;
        assert_eq!(code, 200, "{path}");
        for resource in resources["resources"].as_array().unwrap() {
            let can = |verb: &str| resource["verbs"].as_array().unwrap().contains(&verb.into());
            let collection = format!("{path}/{}", resource["name"].as_str().unwrap());
            if !can("list") {
                continue;
            }
            checked += 1;
            let metadata = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
            for accept in ["application/json", metadata] {
                let (code, list) = api.send("GET", &collection, "application/json", accept, &Value::Null).await;
                assert_eq!(code, 200, "{collection}: {list}");
                assert!(list["items"].is_array(), "{collection}");
            }
            assert!(can("watch"), "{collection}");
            let bookmarks = "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=1";
            let mut watch = api.watch(&format!("{collection}?{bookmarks}")).await;
            while watch.next().await.unwrap()["type"] != "BOOKMARK" {}
        }
    }
    assert!(checked > 20, "only {checked} kinds");
}

#[tokio::test]
async fn pages_show_one_snapshot_during_other_writes() {
    let api = start().await;
    for i in 0..50 {
        api.create(MAPS, map(&format!("m{i:02}"))).await;
    }
    let (mut names, mut token, mut revision) = (Vec::new(), String::new(), None);
    loop {
        let (code, page) = api.get(&format!("{MAPS}?limit=1&continue={token}")).await;
        assert_eq!(code, 200, "{page}");
        assert_eq!(*revision.get_or_insert(version(&page)), version(&page), "every page is of one revision");
        let items = page["items"].as_array().unwrap();
        assert_eq!(items.len(), 1);
        names.push(items[0]["metadata"]["name"].as_str().unwrap().to_owned());
        token = page["metadata"]["continue"].as_str().unwrap_or_default().to_owned();
        if token.is_empty() {
            break;
        }
        let left = page["metadata"]["remainingItemCount"].as_u64().unwrap() as usize;
        assert_eq!(left, 50 - names.len());
        // Objects that are created or deleted between pages do not change the snapshot.
        api.create(MAPS, map(&format!("late{:02}", names.len()))).await;
        api.delete(&format!("{MAPS}/m49")).await;
    }
    assert_eq!(names, (0..50).map(|i| format!("m{i:02}")).collect::<Vec<_>>());
}

#[tokio::test]
async fn names_selectors_dry_runs_and_preconditions() {
    let api = start().await;
    for namespace in ["ns1", "ns10"] {
        api.create("/api/v1/namespaces", json!({ "metadata": { "name": namespace } })).await;
        api.create(&format!("/api/v1/namespaces/{namespace}/configmaps"), map("with.dots")).await;
    }
    let (_, list) = api.get("/api/v1/namespaces/ns1/configmaps").await;
    assert_eq!(list["items"].as_array().unwrap().len(), 1, "ns1 is no prefix of ns10");
    let selector = "fieldSelector=metadata.name%3Dwith.dots,metadata.namespace%3Dns10";
    let (_, list) = api.get(&format!("/api/v1/configmaps?{selector}")).await;
    assert_eq!(list["items"][0]["metadata"]["namespace"], "ns10");
    assert_eq!(api.delete("/api/v1/configmaps").await.0, 405, "not across namespaces");
    let (code, dry) = api.post(&format!("{MAPS}?dryRun=All"), map("dry")).await;
    assert_eq!((code, dry["metadata"].get("resourceVersion")), (201, None));
    assert_eq!(api.get(&format!("{MAPS}/dry")).await.0, 404, "a dry run leaves nothing behind");
    assert!(api.get(MAPS).await.1["items"].as_array().unwrap().is_empty(), "and creates no object under another name");
    let mut generated = map("x");
    generated["metadata"] = json!({ "generateName": "m-" });
    let names = join_all((0..20).map(|_| api.create(MAPS, generated.clone()))).await;
    let names: BTreeSet<_> = names.iter().map(|o| o["metadata"]["name"].to_string()).collect();
    assert_eq!(names.len(), 20, "generated names differ");
    let wrong = json!({ "kind": "DeleteOptions", "apiVersion": "v1", "preconditions": { "uid": "other" } });
    let path = "/api/v1/namespaces/ns1/configmaps/with.dots";
    assert_eq!(api.send("DELETE", path, "application/json", "application/json", &wrong).await.0, 409);
    let pod = json!({ "metadata": { "name": "p" }, "spec": { "serviceAccountName": "absent", "containers": [{ "name": "c", "image": "i" }] } });
    let (code, refused) = api.post("/api/v1/namespaces/default/pods", pod).await;
    assert_eq!(code, 403, "{refused}");
    let bindings = json!({ "metadata": { "name": "gone" }, "target": { "name": "n" } });
    assert_eq!(api.post("/api/v1/namespaces/default/bindings", bindings).await.0, 404);
    assert_eq!(api.get("/api/v1/namespaces/default/pods/gone/log").await.0, 404);
}

#[tokio::test]
async fn dry_runs_send_no_events_and_a_restart_changes_no_object() {
    let api = start().await;
    let created = api.create(MAPS, map("a")).await;
    let mut watch = api.watch(&format!("{MAPS}?watch=1&resourceVersion={}", version(&created))).await;
    let path = format!("{MAPS}/a?dryRun=All");
    assert_eq!(api.post(&format!("{MAPS}?dryRun=All"), map("dry")).await.0, 201);
    assert_eq!(api.patch(&path, json!({ "data": { "k": "dry" } })).await.1["data"]["k"], "dry");
    assert_eq!(api.delete(&path).await.0, 200);
    // Two changes in quick succession arrive in their order.
    for value in ["1", "2"] {
        api.patch(&format!("{MAPS}/a"), json!({ "data": { "k": value } })).await;
    }
    for value in ["1", "2"] {
        assert_eq!(watch.next().await.unwrap()["object"]["data"]["k"], value, "dry runs send no events");
    }
    drop(watch);
    let (_, before) = api.get(&format!("{MAPS}/a")).await;
    let TestApi { client, server, dir } = api;
    drop(client);
    server.close().await;
    let server = ApiServer::open(Config::new(dir.path(), "127.0.0.1:0".parse().unwrap())).await.unwrap();
    let api = TestApi { client: server.client("system:admin"), server, dir };
    let (_, after) = api.get(&format!("{MAPS}/a")).await;
    assert_eq!(after, before, "uid and version are the same after a restart");
    assert!(version(&api.create(MAPS, map("b")).await) > version(&before));
}
