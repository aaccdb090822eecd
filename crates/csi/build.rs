//! Compiles the protos without protoc, and generates a `Debug` implementation for every message that contains secrets.
use std::{env, error::Error, fmt::Write, fs, path::Path};

use protox::prost_reflect::MessageDescriptor;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let mut compiler = protox::Compiler::new(["proto"])?;
    compiler.include_imports(true);
    compiler.open_files(["csi.proto", "pluginregistration.proto"])?;

    let pool = compiler.descriptor_pool();
    let secret = pool.get_extension_by_name("csi.v1.csi_secret").ok_or("csi.v1.csi_secret is not declared")?;
    let mut redacted = Vec::new();
    let mut code = String::new();
    for message in pool.all_messages() {
        let is_secret = |name: &str| {
            message
                .get_field_by_name(name)
                .is_some_and(|field| field.options().get_extension(&secret).as_bool() == Some(true))
        };
        if message.fields().any(|field| is_secret(field.name())) {
            redacted.push(message.full_name().to_owned());
            write_debug(&mut code, &message, &is_secret)?;
        } else if message.get_field_by_name("secrets").is_some() {
            return Err(format!("{}: `secrets` lacks the csi_secret option", message.full_name()).into());
        }
    }
    let out = env::var("OUT_DIR")?;
    fs::write(Path::new(&out).join("redacted.rs"), code)?;

    tonic_prost_build::configure()
        .skip_debug(redacted)
        // A driver implements only the calls that it offers. The others return UNIMPLEMENTED, also those that a later
        // version of the specification adds.
        .generate_default_stubs(true)
        .compile_fds(compiler.file_descriptor_set())?;
    Ok(())
}

fn write_debug(code: &mut String, message: &MessageDescriptor, is_secret: &dyn Fn(&str) -> bool) -> std::fmt::Result {
    let name = message.name();
    writeln!(code, "impl ::core::fmt::Debug for {name} {{")?;
    writeln!(code, "fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {{")?;
    writeln!(code, "f.debug_struct({name:?})")?;
    for field in message.fields() {
        let field = field.name();
        let shown = match field {
            _ if is_secret(field) => format!("crate::redact::RedactedSecrets(&self.{field})"),
            "volume_context" => format!("crate::redact::RedactedContext(&self.{field})"),
            _ => format!("self.{field}"),
        };
        writeln!(code, ".field({field:?}, &{shown})")?;
    }
    writeln!(code, ".finish()\n}}\n}}")
}
