//! The known incompatibilities that concern objects, lists and watches, each by its number in the list of thirty. They
//! are what clients trip over first.

use std::collections::BTreeSet;

use cleat_apiserver::{ApiServer, Config};
use futures::future::join_all;
use serde_json::{Value, json};

use crate::talk::{Talk, causes, map, talk, version};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const CLAIMS: &str = "/api/v1/namespaces/default/persistentvolumeclaims";

fn claim(name: &str, size: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": name },
        "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": size } } },
    })
}

#[tokio::test]
async fn row_7_a_write_that_changes_nothing_is_none() {
    let talk = talk().await;
    let made = talk.made(MAPS, map("a")).await;
    let path = format!("{MAPS}/a");
    let (_, put) = talk.put(&path, made.clone()).await;
    let (_, patched) = talk.patch(&path, json!({ "data": { "k": "v" } })).await;
    assert_eq!((version(&put), version(&patched)), (version(&made), version(&made)));
    let mut watch = talk.watch(&format!("{MAPS}?watch=1&resourceVersion={}", version(&made))).await;
    talk.patch(&path, json!({ "data": { "k": "w" } })).await;
    assert_eq!(watch.next().await.unwrap()["object"]["data"]["k"], "w", "the first event is the first change");
}

#[tokio::test]
async fn row_8_nothing_is_lost_between_a_list_and_the_watch_from_it() {
    let talk = talk().await;
    let names: Vec<String> = (0..60).map(|i| format!("m{i:02}")).collect();
    let writes = join_all(names.iter().map(|name| talk.made(MAPS, map(name))));
    let reads = async {
        let (_, list) = talk.get(MAPS).await;
        let mut seen: BTreeSet<String> =
            list["items"].as_array().unwrap().iter().map(|o| o["metadata"]["name"].as_str().unwrap().into()).collect();
        let mut watch = talk.watch(&format!("{MAPS}?watch=1&resourceVersion={}", version(&list))).await;
        while seen.len() < names.len() {
            let event = watch.next().await.unwrap();
            let name = event["object"]["metadata"]["name"].as_str().unwrap().to_owned();
            assert!(seen.insert(name), "no object is seen twice");
        }
        seen
    };
    let (_, seen) = tokio::join!(writes, reads);
    assert_eq!(seen, names.into_iter().collect());
}

#[tokio::test]
async fn row_10_and_11_versions_are_positive_numbers_even_of_empty_lists() {
    let talk = talk().await;
    let plain = |value: &Value| {
        let text = value["metadata"]["resourceVersion"].as_str().unwrap_or_default().to_owned();
        assert!(text.bytes().all(|b| b.is_ascii_digit()) && !text.starts_with('0') && !text.is_empty(), "{text:?}");
    };
    plain(&talk.get("/apis/coordination.k8s.io/v1/leases").await.1);
    plain(&talk.made(MAPS, map("a")).await);
    let path = format!("{MAPS}?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=1");
    let mut watch = talk.watch(&path).await;
    for _ in 0..2 {
        plain(&watch.next().await.unwrap()["object"]);
    }
}

#[tokio::test]
async fn row_12_a_deletion_has_a_version_of_its_own() {
    let talk = talk().await;
    let made = talk.made(MAPS, map("a")).await;
    let mut watch = talk.watch(&format!("{MAPS}?watch=1&resourceVersion={}", version(&made))).await;
    talk.delete(&format!("{MAPS}/a")).await;
    let deleted = watch.next().await.unwrap();
    assert_eq!(deleted["type"], "DELETED");
    assert!(version(&deleted["object"]) > version(&made));
    let mut resumed = talk.watch(&format!("{MAPS}?watch=1&resourceVersion={}", version(&deleted["object"]))).await;
    talk.made(MAPS, map("b")).await;
    let next = resumed.next().await.unwrap();
    assert_eq!((next["type"].as_str(), &next["object"]["metadata"]["name"]), (Some("ADDED"), &json!("b")));
}

#[tokio::test]
async fn row_13_what_leaves_a_selector_is_deleted_for_its_watchers() {
    let talk = talk().await;
    let mut labelled = map("a");
    labelled["metadata"]["labels"] = json!({ "a": "b" });
    let made = talk.made(MAPS, labelled).await;
    let path = format!("{MAPS}?watch=1&labelSelector=a%3Db&resourceVersion={}", version(&made));
    let mut watch = talk.watch(&path).await;
    let (_, after) = talk.patch(&format!("{MAPS}/a"), json!({ "metadata": { "labels": { "a": "c" } } })).await;
    let event = watch.next().await.unwrap();
    assert_eq!((event["type"].as_str(), &event["object"]["metadata"]["labels"]["a"]), (Some("DELETED"), &json!("b")));
    assert_eq!(version(&event["object"]), version(&after), "the old object at the version of the change");
}

#[tokio::test]
async fn row_14_a_watch_from_zero_begins_with_what_is_there() {
    let talk = talk().await;
    talk.made(MAPS, map("a")).await;
    let mut watch = talk.watch(&format!("{MAPS}?watch=1&resourceVersion=0&fieldSelector=metadata.name%3Da")).await;
    assert_eq!(watch.next().await.unwrap()["type"], "ADDED");
}

#[tokio::test]
async fn row_15_leases_are_won_by_exactly_one() {
    let talk = talk().await;
    let leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
    let lease = |holder: String| json!({ "metadata": { "name": "l" }, "spec": { "holderIdentity": holder } });
    let tries = join_all((0..16).map(|i| talk.post(leases, lease(i.to_string())))).await;
    assert_eq!(tries.iter().filter(|(code, _)| *code == 201).count(), 1);
    let lost = tries.iter().find(|(code, _)| *code != 201).unwrap();
    assert_eq!((lost.0, lost.1["reason"].as_str()), (409, Some("AlreadyExists")));
    let (_, current) = talk.get(&format!("{leases}/l")).await;
    let renewals = join_all((0..16).map(|i| {
        let mut renewal = current.clone();
        renewal["spec"]["holderIdentity"] = format!("next-{i}").into();
        let (talk, path) = (&talk, format!("{leases}/l"));
        async move { talk.put(&path, renewal).await }
    }))
    .await;
    assert_eq!(renewals.iter().filter(|(code, _)| *code == 200).count(), 1);
    let lost = renewals.iter().find(|(code, _)| *code != 200).unwrap();
    assert_eq!((lost.0, lost.1["reason"].as_str()), (409, Some("Conflict")));
    assert_eq!(talk.put(&format!("{leases}/l"), lease("blind".into())).await.0, 422, "a version is required");
}

#[tokio::test]
async fn row_20_deletion_answers_with_a_uid_to_wait_for_or_the_object_that_waits() {
    let talk = talk().await;
    let made = talk.made(MAPS, map("a")).await;
    let (_, status) = talk.delete(&format!("{MAPS}/a")).await;
    assert_eq!((status["kind"].as_str(), &status["details"]["uid"]), (Some("Status"), &made["metadata"]["uid"]));
    talk.made(CLAIMS, claim("c", "1Gi")).await;
    let (_, waiting) = talk.delete(&format!("{CLAIMS}/c")).await;
    assert_eq!(waiting["kind"], "PersistentVolumeClaim");
    assert_eq!(waiting["metadata"]["deletionGracePeriodSeconds"], 0);
}

#[tokio::test]
async fn row_21_and_22_the_last_finalizer_ends_the_object_and_no_new_one_comes() {
    let talk = talk().await;
    let made = talk.made(CLAIMS, claim("c", "1Gi")).await;
    let path = format!("{CLAIMS}/c");
    talk.delete(&path).await;
    let more = json!({ "metadata": { "finalizers": ["kubernetes.io/pvc-protection", "example.com/late"] } });
    let (code, refused) = talk.patch(&path, more).await;
    assert_eq!((code, causes(&refused)), (422, vec!["metadata.finalizers".into()]));
    let mut watch = talk.watch(&format!("{CLAIMS}?watch=1&resourceVersion={}", version(&made))).await;
    assert_eq!(talk.patch(&path, json!({ "metadata": { "finalizers": null } })).await.0, 200);
    assert_eq!(watch.next().await.unwrap()["type"], "MODIFIED");
    assert_eq!(watch.next().await.unwrap()["type"], "DELETED");
    assert_eq!(talk.get(&path).await.0, 404);
}

#[tokio::test]
async fn row_23_a_version_in_a_patch_is_a_precondition() {
    let talk = talk().await;
    let made = talk.made(MAPS, map("a")).await;
    let path = format!("{MAPS}/a");
    talk.patch(&path, json!({ "data": { "k": "w" } })).await;
    let stale = json!({ "metadata": { "resourceVersion": version(&made).to_string() }, "data": { "k": "x" } });
    let (code, refused) = talk.patch(&path, stale).await;
    assert_eq!((code, refused["reason"].as_str()), (409, Some("Conflict")));
}

#[tokio::test]
async fn row_25_a_claim_is_pending_from_its_first_moment() {
    let talk = talk().await;
    let mut watch = talk.watch(&format!("{CLAIMS}?watch=1&resourceVersion=0")).await;
    let made = talk.made(CLAIMS, claim("c", "1Gi")).await;
    assert_eq!(made["status"]["phase"], "Pending");
    assert_eq!(watch.next().await.unwrap()["object"]["status"]["phase"], "Pending");
}

#[tokio::test]
async fn row_26_what_was_read_can_be_written_back_without_a_difference() {
    let talk = talk().await;
    let classes = "/apis/storage.k8s.io/v1/storageclasses";
    let drivers = "/apis/storage.k8s.io/v1/csidrivers";
    let class = json!({ "metadata": { "name": "x" }, "provisioner": "x.example.com" });
    let driver = json!({ "metadata": { "name": "x.example.com" }, "spec": {} });
    for (collection, body) in [(classes, class), (drivers, driver), (CLAIMS, claim("c", "1024Mi"))] {
        let made = talk.made(collection, body.clone()).await;
        let path = format!("{collection}/{}", made["metadata"]["name"].as_str().unwrap());
        let (_, mut first) = talk.patch(&path, body.clone()).await;
        if collection == CLAIMS {
            assert!(version(&first) > version(&made), "the first write of a claim writes its phase down");
            first["metadata"]["resourceVersion"] = made["metadata"]["resourceVersion"].clone();
            first["metadata"]["managedFields"] = made["metadata"]["managedFields"].clone();
        }
        assert_eq!(first, made);
        let (_, now) = talk.get(&path).await;
        let (code, same) = talk.patch(&path, body).await;
        assert_eq!((code, version(&same)), (200, version(&now)), "{same}");
    }
    let (_, seen) = talk.get(&format!("{CLAIMS}/c")).await;
    assert_eq!(seen["spec"]["resources"]["requests"]["storage"], "1Gi");
}

#[tokio::test]
async fn row_28_every_kind_can_do_what_discovery_says_it_can() {
    let talk = talk().await;
    let (_, groups) = talk.get("/apis").await;
    let mut versions = vec!["/api/v1".to_owned()];
    for group in groups["groups"].as_array().unwrap() {
        let versions_of = group["versions"].as_array().unwrap();
        versions.extend(versions_of.iter().map(|v| format!("/apis/{}", v["groupVersion"].as_str().unwrap())));
    }
    let mut checked = 0;
    for path in versions {
        let (code, resources) = talk.get(&path).await;
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
                let (code, list) = talk.send("GET", &collection, "application/json", accept, &Value::Null).await;
                assert_eq!(code, 200, "{collection}: {list}");
                assert!(list["items"].is_array(), "{collection}");
            }
            assert!(can("watch"), "{collection}");
            let bookmarks = "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=1";
            let mut watch = talk.watch(&format!("{collection}?{bookmarks}")).await;
            while watch.next().await.unwrap()["type"] != "BOOKMARK" {}
        }
    }
    assert!(checked > 20, "only {checked} kinds");
}

#[tokio::test]
async fn row_29_pages_show_one_snapshot_while_others_write() {
    let talk = talk().await;
    for i in 0..50 {
        talk.made(MAPS, map(&format!("m{i:02}"))).await;
    }
    let (mut seen, mut token, mut revision) = (Vec::new(), String::new(), None);
    loop {
        let (code, page) = talk.get(&format!("{MAPS}?limit=1&continue={token}")).await;
        assert_eq!(code, 200, "{page}");
        assert_eq!(*revision.get_or_insert(version(&page)), version(&page), "every page is of one revision");
        let items = page["items"].as_array().unwrap();
        assert_eq!(items.len(), 1);
        seen.push(items[0]["metadata"]["name"].as_str().unwrap().to_owned());
        token = page["metadata"]["continue"].as_str().unwrap_or_default().to_owned();
        if token.is_empty() {
            break;
        }
        let left = page["metadata"]["remainingItemCount"].as_u64().unwrap() as usize;
        assert_eq!(left, 50 - seen.len());
        // Objects that come and go meanwhile are not in the snapshot.
        talk.made(MAPS, map(&format!("late{:02}", seen.len()))).await;
        talk.delete(&format!("{MAPS}/m49")).await;
    }
    assert_eq!(seen, (0..50).map(|i| format!("m{i:02}")).collect::<Vec<_>>());
}

#[tokio::test]
async fn and_some_more_worth_a_test_each() {
    let talk = talk().await;
    for namespace in ["ns1", "ns10"] {
        talk.made("/api/v1/namespaces", json!({ "metadata": { "name": namespace } })).await;
        talk.made(&format!("/api/v1/namespaces/{namespace}/configmaps"), map("with.dots")).await;
    }
    let (_, list) = talk.get("/api/v1/namespaces/ns1/configmaps").await;
    assert_eq!(list["items"].as_array().unwrap().len(), 1, "ns1 is no prefix of ns10");
    let selector = "fieldSelector=metadata.name%3Dwith.dots,metadata.namespace%3Dns10";
    let (_, list) = talk.get(&format!("/api/v1/configmaps?{selector}")).await;
    assert_eq!(list["items"][0]["metadata"]["namespace"], "ns10");
    assert_eq!(talk.delete("/api/v1/configmaps").await.0, 405, "not across namespaces");
    let (code, dry) = talk.post(&format!("{MAPS}?dryRun=All"), map("dry")).await;
    assert_eq!((code, dry["metadata"].get("resourceVersion")), (201, None));
    assert_eq!(talk.get(&format!("{MAPS}/dry")).await.0, 404, "a dry run leaves nothing behind");
    assert!(talk.get(MAPS).await.1["items"].as_array().unwrap().is_empty(), "nor under another name");
    let mut generated = map("x");
    generated["metadata"] = json!({ "generateName": "m-" });
    let names = join_all((0..20).map(|_| talk.made(MAPS, generated.clone()))).await;
    let names: BTreeSet<_> = names.iter().map(|o| o["metadata"]["name"].to_string()).collect();
    assert_eq!(names.len(), 20, "generated names differ");
    let wrong = json!({ "kind": "DeleteOptions", "apiVersion": "v1", "preconditions": { "uid": "other" } });
    let path = "/api/v1/namespaces/ns1/configmaps/with.dots";
    assert_eq!(talk.send("DELETE", path, "application/json", "application/json", &wrong).await.0, 409);
    let pod = json!({ "metadata": { "name": "p" }, "spec": { "serviceAccountName": "absent", "containers": [{ "name": "c", "image": "i" }] } });
    let (code, refused) = talk.post("/api/v1/namespaces/default/pods", pod).await;
    assert_eq!(code, 403, "{refused}");
    let bindings = json!({ "metadata": { "name": "gone" }, "target": { "name": "n" } });
    assert_eq!(talk.post("/api/v1/namespaces/default/bindings", bindings).await.0, 404);
    assert_eq!(talk.get("/api/v1/namespaces/default/pods/gone/log").await.0, 404);
}

#[tokio::test]
async fn and_what_a_restart_and_a_dry_run_leave_alone() {
    let talk = talk().await;
    let made = talk.made(MAPS, map("a")).await;
    let mut watch = talk.watch(&format!("{MAPS}?watch=1&resourceVersion={}", version(&made))).await;
    let path = format!("{MAPS}/a?dryRun=All");
    assert_eq!(talk.post(&format!("{MAPS}?dryRun=All"), map("dry")).await.0, 201);
    assert_eq!(talk.patch(&path, json!({ "data": { "k": "dry" } })).await.1["data"]["k"], "dry");
    assert_eq!(talk.delete(&path).await.0, 200);
    // Two changes, as fast as they come, in their order.
    for value in ["1", "2"] {
        talk.patch(&format!("{MAPS}/a"), json!({ "data": { "k": value } })).await;
    }
    for value in ["1", "2"] {
        assert_eq!(watch.next().await.unwrap()["object"]["data"]["k"], value, "nothing was seen of the dry runs");
    }
    drop(watch);
    let (_, before) = talk.get(&format!("{MAPS}/a")).await;
    let Talk { client, server, dir } = talk;
    drop(client);
    server.close().await;
    let server = ApiServer::open(Config::new(dir.path(), "127.0.0.1:0".parse().unwrap())).await.unwrap();
    let talk = Talk { client: server.client("system:admin"), server, dir };
    let (_, after) = talk.get(&format!("{MAPS}/a")).await;
    assert_eq!(after, before, "uid and version are the same after a restart");
    assert!(version(&talk.made(MAPS, map("b")).await) > version(&before));
}
