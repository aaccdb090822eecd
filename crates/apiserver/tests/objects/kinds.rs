//! Behaviour of single kinds: workloads, events in both groups, VolumeAttributesClasses, Secrets, ConfigMaps, nodes,
//! pods.

use serde_json::{Value, json};

use crate::test_api::{causes, map, start, version};

fn workload(kind: &str, api_version: &str, restart: &str) -> Value {
    let template = json!({
        "metadata": { "labels": { "app": "x" } },
        "spec": { "restartPolicy": restart, "containers": [{ "name": "c", "image": "i:1" }] },
    });
    let mut created = json!({
        "apiVersion": api_version, "kind": kind, "metadata": { "name": "w" },
        "spec": { "selector": { "matchLabels": { "app": "x" } }, "template": template },
    });
    if kind == "Job" {
        created["spec"].as_object_mut().unwrap().remove("selector");
    }
    created
}

const WORKLOADS: [(&str, &str, &str, &str); 5] = [
    ("Deployment", "apps", "deployments", "Always"),
    ("StatefulSet", "apps", "statefulsets", "Always"),
    ("DaemonSet", "apps", "daemonsets", "Always"),
    ("ReplicaSet", "apps", "replicasets", "Always"),
    ("Job", "batch", "jobs", "Never"),
];

#[tokio::test]
async fn workloads_are_stored_with_defaults_and_generations() {
    let api = start().await;
    for (kind, group, plural, restart) in WORKLOADS {
        let base = format!("/apis/{group}/v1/namespaces/default/{plural}");
        let mut sent = workload(kind, &format!("{group}/v1"), restart);
        sent["status"] = json!({ "observedGeneration": 7 });
        let created = api.create(&base, sent).await;
        assert_eq!(created["metadata"]["generation"], 1, "{kind}");
        assert!(created["status"].get("observedGeneration").is_none(), "{kind}: a new object has no status");
        assert_eq!(created["spec"]["template"]["spec"]["dnsPolicy"], "ClusterFirst", "{kind}");
        let (_, same) = api.put(&format!("{base}/w"), created.clone()).await;
        assert_eq!(version(&same), version(&created), "{kind}: defaults are stable");
        let status = if kind == "Job" { json!({ "active": 1 }) } else { json!({ "observedGeneration": 1 }) };
        let (_, after) = api.patch(&format!("{base}/w/status"), json!({ "status": status })).await;
        assert_eq!(
            (&after["metadata"]["generation"], version(&after) > version(&created)),
            (&json!(1), true),
            "{kind}"
        );
        let changed = json!({ "spec": { "template": { "metadata": { "labels": { "app": "other" } } } } });
        let (code, refused) = api.patch(&format!("{base}/w"), changed).await;
        assert_eq!(code, 422, "{kind}: {refused}");
        let table = api.table(&base).await;
        let cells = table["rows"][0]["cells"].as_array().unwrap().len();
        assert_eq!(cells, table["columnDefinitions"].as_array().unwrap().len(), "{kind}");
    }
}

#[tokio::test]
async fn workloads_have_a_scale_subresource() {
    let api = start().await;
    let base = "/apis/apps/v1/namespaces/default/deployments";
    api.create(base, workload("Deployment", "apps/v1", "Always")).await;
    let (_, mut scale) = api.get(&format!("{base}/w/scale")).await;
    assert_eq!(scale["status"]["selector"], "app=x");
    scale["spec"]["replicas"] = json!(4);
    let (code, scaled) = api.put(&format!("{base}/w/scale"), scale.clone()).await;
    assert_eq!((code, &scaled["spec"]["replicas"]), (200, &json!(4)), "{scaled}");
    assert_eq!(api.get(&format!("{base}/w")).await.1["metadata"]["generation"], 2);
    assert_eq!(api.put(&format!("{base}/w/scale"), scale.clone()).await.0, 409, "a stale scale is refused");
    scale["metadata"].as_object_mut().unwrap().remove("resourceVersion");
    scale["spec"]["replicas"] = json!(-1);
    let (code, refused) = api.put(&format!("{base}/w/scale"), scale).await;
    assert_eq!((code, causes(&refused)), (422, vec!["spec.replicas".into()]));
}

#[tokio::test]
async fn a_job_with_a_generated_name_labels_its_pods_with_it() {
    let api = start().await;
    let mut job = workload("Job", "batch/v1", "Never");
    job["metadata"] = json!({ "generateName": "job-" });
    let created = api.create("/apis/batch/v1/namespaces/default/jobs", job).await;
    let labels = &created["spec"]["template"]["metadata"]["labels"];
    assert_eq!(labels["batch.kubernetes.io/job-name"], created["metadata"]["name"]);
    assert_eq!(labels["batch.kubernetes.io/controller-uid"], created["metadata"]["uid"]);
    assert_eq!(
        created["spec"]["selector"]["matchLabels"],
        json!({ "batch.kubernetes.io/controller-uid": created["metadata"]["uid"] })
    );
}

#[tokio::test]
async fn an_event_is_served_in_both_groups() {
    let api = start().await;
    let core = "/api/v1/namespaces/default/events";
    let newer = "/apis/events.k8s.io/v1/namespaces/default/events";
    let event = json!({
        "metadata": { "name": "e" }, "involvedObject": { "kind": "Pod", "name": "p", "namespace": "default" },
        "reason": "Because", "message": "it happened", "type": "Normal", "count": 1,
    });
    let created = api.create(core, event).await;
    let (_, event) = api.get(&format!("{newer}/e")).await;
    assert_eq!((event["note"].as_str(), event["apiVersion"].as_str()), (Some("it happened"), Some("events.k8s.io/v1")));
    assert_eq!(version(&event), version(&created));
    // Event recorders count repetitions with a strategic merge patch, in either group.
    let media = "application/strategic-merge-patch+json";
    let again = json!({ "deprecatedCount": 2 });
    let (code, _) = api.send("PATCH", &format!("{newer}/e"), media, "application/json", &again).await;
    assert_eq!(code, 200);
    assert_eq!(api.get(&format!("{core}/e")).await.1["count"], 2);
    let (_, list) = api.get(&format!("{newer}?fieldSelector=regarding.name%3Dp")).await;
    assert_eq!((list["kind"].as_str(), list["items"].as_array().unwrap().len()), (Some("EventList"), 1));
    let (code, refused) = api.post(newer, json!({ "metadata": { "name": "f" }, "reason": "Because" })).await;
    assert_eq!(code, 422);
    assert!(causes(&refused).contains(&"eventTime".to_owned()), "{refused}");
    let mut watch = api.watch(&format!("{newer}?watch=1&resourceVersion=0")).await;
    let first = watch.next().await.unwrap();
    assert_eq!((first["type"].as_str(), first["object"]["note"].as_str()), (Some("ADDED"), Some("it happened")));
}

#[tokio::test]
async fn volume_attributes_classes_have_a_finalizer_and_are_immutable() {
    let api = start().await;
    let class = json!({ "metadata": { "name": "gold" }, "driverName": "d.example.com", "parameters": { "iops": "1" } });
    let created = api.create("/apis/storage.k8s.io/v1/volumeattributesclasses", class).await;
    assert_eq!(created["metadata"]["finalizers"], json!(["kubernetes.io/vac-protection"]));
    let path = "/apis/storage.k8s.io/v1/volumeattributesclasses/gold";
    let (code, refused) = api.patch(path, json!({ "parameters": { "iops": "2" } })).await;
    assert_eq!((code, causes(&refused)), (422, vec!["parameters".into()]));
}

#[tokio::test]
async fn immutable_secrets_and_config_maps_cannot_change() {
    let api = start().await;
    let secrets = "/api/v1/namespaces/default/secrets";
    let secret = json!({ "metadata": { "name": "s" }, "stringData": { "k": "v" }, "immutable": true });
    let created = api.create(secrets, secret).await;
    assert_eq!((&created["data"]["k"], created.get("stringData")), (&json!("dg=="), None));
    let path = format!("{secrets}/s");
    assert_eq!(causes(&api.patch(&path, json!({ "data": { "k": "dw==" } })).await.1), ["data"]);
    assert_eq!(causes(&api.patch(&path, json!({ "immutable": false })).await.1), ["immutable"]);
    assert_eq!(causes(&api.patch(&path, json!({ "type": "other" })).await.1), ["type"]);
    for (kind, data, missing) in [
        ("kubernetes.io/tls", json!({ "tls.crt": "" }), vec!["data[tls.key]"]),
        ("kubernetes.io/dockerconfigjson", json!({}), vec!["data[.dockerconfigjson]"]),
        ("kubernetes.io/basic-auth", json!({}), vec!["data[username]", "data[password]"]),
        ("kubernetes.io/ssh-auth", json!({}), vec!["data[ssh-privatekey]"]),
    ] {
        let (code, refused) =
            api.post(secrets, json!({ "metadata": { "name": "t" }, "type": kind, "data": data })).await;
        assert_eq!((code, causes(&refused)), (422, missing.iter().map(ToString::to_string).collect()), "{kind}");
    }
    let maps = "/api/v1/namespaces/default/configmaps";
    let mut frozen = map("m");
    frozen["immutable"] = json!(true);
    api.create(maps, frozen).await;
    assert_eq!(causes(&api.patch(&format!("{maps}/m"), json!({ "data": { "k": "w" } })).await.1), ["data"]);
}

#[tokio::test]
async fn zero_values_are_not_stored_and_change_nothing() {
    let api = start().await;
    let pods = "/api/v1/namespaces/default/pods";
    let pod = json!({ "metadata": { "name": "p", "labels": {} }, "spec": {
        "hostNetwork": false, "tolerations": [], "nodeName": "", "automountServiceAccountToken": false,
        "containers": [{ "name": "c", "image": "i", "command": [], "stdin": false }],
    } });
    let created = api.create(pods, pod).await;
    let spec = &created["spec"];
    for absent in ["hostNetwork", "nodeName"] {
        assert_eq!(spec.get(absent), None, "{spec}");
    }
    assert_eq!((spec["containers"][0].get("command"), created["metadata"].get("labels")), (None, None));
    assert_eq!(spec["automountServiceAccountToken"], false, "for this field false differs from absent");
    assert_eq!(spec["tolerations"].as_array().unwrap().len(), 2, "the default tolerations");
    for zeros in [json!({ "tolerations": [] }), json!({ "hostPID": false, "hostname": "" })] {
        let (code, same) = api.patch(&format!("{pods}/p"), json!({ "spec": zeros })).await;
        assert_eq!((code, &same), (200, &created));
    }
    let volume = json!({ "metadata": { "name": "v" }, "spec": {
        "capacity": { "storage": "1Gi" }, "accessModes": ["ReadWriteOnce"], "storageClassName": "",
        "hostPath": { "path": "/x" },
    } });
    let created = api.create("/api/v1/persistentvolumes", volume.clone()).await;
    assert_eq!(created["spec"].get("storageClassName"), None);
    assert_eq!(created["spec"]["hostPath"]["type"], "");
    let applied = json!({ "apiVersion": "v1", "kind": "PersistentVolume", "metadata": volume["metadata"], "spec": volume["spec"] });
    let path = "/api/v1/persistentvolumes/v?fieldManager=m&force=true";
    let (code, applied) = api.send("PATCH", path, "application/apply-patch+yaml", "application/json", &applied).await;
    assert_eq!((code, applied["spec"].get("storageClassName")), (200, None));
}

#[tokio::test]
async fn a_new_node_has_the_not_ready_taint() {
    let api = start().await;
    let unready = json!({ "key": "node.kubernetes.io/not-ready", "effect": "NoSchedule" });
    let own = json!({ "key": "k", "effect": "NoSchedule" });
    for (name, has, want) in [
        ("a", json!(null), json!([unready])),
        ("b", json!([own]), json!([own, unready])),
        ("c", json!([unready, own]), json!([unready, own])),
    ] {
        let node = json!({ "metadata": { "name": name }, "spec": { "taints": has } });
        assert_eq!(api.create("/api/v1/nodes", node).await["spec"]["taints"], want, "{name}");
    }
    let (_, lifted) = api.patch("/api/v1/nodes/a", json!({ "spec": { "taints": null } })).await;
    assert_eq!(lifted["spec"].get("taints"), None, "an update may remove it");
}

#[tokio::test]
async fn a_log_request_fails_with_the_reason() {
    let api = start().await;
    let pods = "/api/v1/namespaces/default/pods";
    let pod = |name: &str, node: &str, containers: &[&str]| {
        let containers: Vec<_> = containers.iter().map(|c| json!({ "name": c, "image": "i" })).collect();
        json!({ "metadata": { "name": name }, "spec": { "nodeName": node, "containers": containers } })
    };
    api.create(pods, pod("free", "", &["c"])).await;
    api.create(pods, pod("placed", "n", &["c"])).await;
    api.create(pods, pod("two", "n", &["c", "d"])).await;
    for (path, code, want) in [
        ("none/log", 404, "pods \"none\" not found"),
        ("free/log", 400, "pod free does not have a host assigned"),
        ("placed/log", 400, "container \"c\" in pod \"placed\" is waiting to start"),
        ("placed/log?container=x", 400, "container x is not valid for pod placed"),
        ("two/log", 400, "a container name must be specified for pod two, choose one of: [c d]"),
        ("two/log?container=d", 400, "container \"d\" in pod \"two\" is waiting to start"),
    ] {
        let (got, refused) = api.get(&format!("{pods}/{path}")).await;
        assert_eq!(got, code, "{path}: {refused}");
        assert!(refused["message"].as_str().unwrap().contains(want), "{path}: {refused}");
    }
}
