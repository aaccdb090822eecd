//! The protobuf encoding of OpenAPI v2 documents, which kubectl requests. Field numbers are those of the message
//! `openapi.v2.Document`; only fields that Cleat's documents contain are encoded.

use serde_json::{Map, Value};

pub(super) fn encode(document: &Value) -> Vec<u8> {
    let mut out = Message::default();
    out.text(1, &document["swagger"]);
    let mut info = Message::default();
    info.text(1, &document["info"]["title"]);
    info.text(2, &document["info"]["version"]);
    out.message(2, info);
    let mut paths = Message::default();
    for (path, item) in entries(&document["paths"]) {
        paths.message(2, named(path, path_item(item)));
    }
    out.message(8, paths);
    let mut definitions = Message::default();
    for (name, definition) in entries(&document["definitions"]) {
        definitions.message(1, named(name, schema(definition)));
    }
    out.message(9, definitions);
    out.0
}

#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.varint(field << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    fn message(&mut self, field: u64, message: Message) {
        self.bytes(field, &message.0);
    }

    fn text(&mut self, field: u64, value: &Value) {
        if let Some(text) = value.as_str() {
            self.bytes(field, text.as_bytes());
        }
    }

    fn flag(&mut self, field: u64, value: &Value) {
        if *value == true {
            self.varint(field << 3);
            self.varint(1);
        }
    }

    fn texts(&mut self, field: u64, value: &Value) {
        for text in value.as_array().into_iter().flatten() {
            self.text(field, text);
        }
    }
}

fn entries(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flat_map(Map::iter)
}

/// A `NamedX` message: a name and a value.
fn named(name: &str, value: Message) -> Message {
    let mut out = Message::default();
    out.bytes(1, name.as_bytes());
    out.message(2, value);
    out
}

/// An `Any` message: the value as YAML, of which JSON is a subset.
fn any(value: &Value) -> Message {
    let mut out = Message::default();
    out.bytes(2, value.to_string().as_bytes());
    out
}

fn extensions(out: &mut Message, field: u64, fields: &Value) {
    for (name, value) in entries(fields).filter(|(name, _)| name.starts_with("x-")) {
        out.message(field, named(name, any(value)));
    }
}

fn schema(fields: &Value) -> Message {
    let mut out = Message::default();
    out.text(1, &fields["$ref"]);
    out.text(2, &fields["format"]);
    out.text(4, &fields["description"]);
    if let Some(default) = fields.get("default") {
        out.message(5, any(default));
    }
    out.texts(19, &fields["required"]);
    for value in fields["enum"].as_array().into_iter().flatten() {
        out.message(20, any(value));
    }
    match &fields["additionalProperties"] {
        element @ Value::Object(_) => {
            let mut item = Message::default();
            item.message(1, schema(element));
            out.message(21, item);
        }
        allowed @ Value::Bool(_) => {
            let mut item = Message::default();
            item.flag(2, allowed);
            out.message(21, item);
        }
        _ => {}
    }
    if let Some(type_name) = fields["type"].as_str() {
        let mut item = Message::default();
        item.bytes(1, type_name.as_bytes());
        out.message(22, item);
    }
    if fields["items"].is_object() {
        let mut items = Message::default();
        items.message(1, schema(&fields["items"]));
        out.message(23, items);
    }
    if fields["properties"].is_object() {
        let mut properties = Message::default();
        for (name, property) in entries(&fields["properties"]) {
            properties.message(1, named(name, schema(property)));
        }
        out.message(25, properties);
    }
    extensions(&mut out, 31, fields);
    out
}

fn path_item(item: &Value) -> Message {
    let mut out = Message::default();
    let methods = [(2, "get"), (3, "put"), (4, "post"), (5, "delete"), (8, "patch")];
    for (field, method) in methods {
        if item[method].is_object() {
            out.message(field, operation(&item[method]));
        }
    }
    for parameter in item["parameters"].as_array().into_iter().flatten() {
        out.message(9, parameter_item(parameter));
    }
    out
}

fn operation(fields: &Value) -> Message {
    let mut out = Message::default();
    out.text(5, &fields["operationId"]);
    out.texts(7, &fields["consumes"]);
    for parameter in fields["parameters"].as_array().into_iter().flatten() {
        out.message(8, parameter_item(parameter));
    }
    let mut responses = Message::default();
    for (code, response) in entries(&fields["responses"]) {
        responses.message(1, named(code, response_value(response)));
    }
    out.message(9, responses);
    extensions(&mut out, 13, fields);
    out
}

fn response_value(fields: &Value) -> Message {
    let mut response = Message::default();
    response.text(1, &fields["description"]);
    if fields["schema"].is_object() {
        let mut item = Message::default();
        item.message(1, schema(&fields["schema"]));
        response.message(2, item);
    }
    let mut out = Message::default();
    out.message(1, response);
    out
}

fn parameter_item(fields: &Value) -> Message {
    let mut parameter = Message::default();
    if fields["in"] == "body" {
        let mut body = Message::default();
        body.text(2, &fields["name"]);
        body.text(3, &fields["in"]);
        body.flag(4, &fields["required"]);
        body.message(5, schema(&fields["schema"]));
        parameter.message(1, body);
    } else {
        let mut plain = Message::default();
        plain.flag(1, &fields["required"]);
        plain.text(2, &fields["in"]);
        plain.text(4, &fields["name"]);
        // Path parameters have no field `allowEmptyValue`, so their `type` has a lower number.
        let type_field = if fields["in"] == "path" { 5 } else { 6 };
        plain.text(type_field, &fields["type"]);
        let mut item = Message::default();
        item.message(if fields["in"] == "path" { 4 } else { 3 }, plain);
        parameter.message(2, item);
    }
    let mut out = Message::default();
    out.message(1, parameter);
    out
}
