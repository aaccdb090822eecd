//! Walks the syntax tree of one file and notes its paths and definitions, each with whether it belongs to tests only.

use std::ops::Range;

use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};
use syn::ext::IdentExt as _;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Ident, ImplItem, Item, Meta, TraitItem, UseTree};

use super::{CodePath, Definition, DefinitionKind, ModuleDeclaration};

#[derive(Default)]
pub(super) struct Collected {
    pub(super) paths: Vec<CodePath>,
    pub(super) definitions: Vec<Definition>,
    pub(super) declarations: Vec<ModuleDeclaration>,
    /// The bytes of the outermost items that are for tests only.
    pub(super) test_ranges: Vec<Range<usize>>,
    /// Whether the file opens with `#![cfg(test)]`.
    pub(super) is_test_file: bool,
}

pub(super) fn collect(file: &syn::File) -> Collected {
    let is_test_file = file.attrs.iter().any(is_test_attribute);
    let mut collector = Collector { test_only: is_test_file, ..Collector::default() };
    collector.visit_file(file);
    Collected { is_test_file, ..collector.collected }
}

#[derive(Default)]
struct Collector {
    collected: Collected,
    /// The inline modules around the current node.
    inline_modules: Vec<String>,
    test_only: bool,
    function_depth: usize,
    is_in_parameters: bool,
    is_in_attribute: bool,
}

impl Collector {
    /// Visits a node that attributes stand on.
    fn with_attributes(&mut self, attributes: &[Attribute], node: &impl Spanned, visit: impl FnOnce(&mut Self)) {
        let outer = self.test_only;
        if !outer && attributes.iter().any(is_test_attribute) {
            self.test_only = true;
            self.collected.test_ranges.push(node.span().byte_range());
        }
        visit(self);
        self.test_only = outer;
    }

    fn define(&mut self, ident: &Ident, kind: DefinitionKind) {
        self.collected.definitions.push(Definition {
            line: ident.span().start().line,
            inline_modules: self.inline_modules.clone(),
            name: ident.unraw().to_string(),
            kind,
            test_only: self.test_only,
            is_local: self.function_depth > 0,
        });
    }

    fn add_path(&mut self, line: usize, segments: Vec<String>, imports_as: Option<String>) {
        let (inline_modules, test_only) = (self.inline_modules.clone(), self.test_only);
        self.collected.paths.push(CodePath { line, inline_modules, segments, imports_as, test_only });
    }

    fn add_use_tree(&mut self, tree: &UseTree, prefix: &[String]) {
        let with = |ident: &Ident| [prefix, &[ident.unraw().to_string()]].concat();
        match tree {
            UseTree::Path(path) => self.add_use_tree(&path.tree, &with(&path.ident)),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.add_use_tree(tree, prefix)),
            UseTree::Glob(glob) => {
                let segments = [prefix, &["*".to_owned()]].concat();
                self.add_path(glob.star_token.span.start().line, segments, Some("*".to_owned()));
            }
            UseTree::Name(name) => {
                let segments = with(&name.ident);
                let bound = if name.ident == "self" { prefix.last() } else { segments.last() }.cloned();
                self.add_path(name.ident.span().start().line, segments, Some(bound.unwrap_or_default()));
            }
            UseTree::Rename(rename) => {
                if rename.rename != "_" {
                    self.define(&rename.rename, DefinitionKind::Variable);
                }
                let bound = rename.rename.unraw().to_string();
                self.add_path(rename.ident.span().start().line, with(&rename.ident), Some(bound));
            }
        }
    }

    /// Reads what a macro or an attribute was given: its paths, and in macros its names.
    fn add_tokens(&mut self, stream: &TokenStream) {
        let trees: Vec<TokenTree> = stream.clone().into_iter().collect();
        let mut at = 0;
        while let Some(tree) = trees.get(at) {
            at += 1;
            match tree {
                TokenTree::Group(group) => self.add_tokens(&group.stream()),
                TokenTree::Punct(_) => {}
                TokenTree::Literal(literal) => {
                    // `#[serde(with = "crate::time")]` names a module as a string.
                    let text = literal.to_string();
                    let path = text.trim_matches('"');
                    if self.is_in_attribute && (path.starts_with("crate::") || path.starts_with("super::")) {
                        let segments = path.split("::").map(ToOwned::to_owned).collect();
                        self.add_path(literal.span().start().line, segments, None);
                    }
                }
                TokenTree::Ident(first) => {
                    let line = first.span().start().line;
                    let mut segments = vec![first.unraw().to_string()];
                    self.define_in_macro(first);
                    while let Some(ident) = next_segment(&trees[at..]) {
                        segments.push(ident.unraw().to_string());
                        self.define_in_macro(ident);
                        at += 3;
                    }
                    if segments.len() > 1 {
                        self.add_path(line, segments, None);
                    }
                }
            }
        }
    }

    fn define_in_macro(&mut self, ident: &Ident) {
        if !self.is_in_attribute {
            self.define(ident, DefinitionKind::InMacro);
        }
    }
}

/// The identifier after `::`, if that is how `trees` begins.
fn next_segment(trees: &[TokenTree]) -> Option<&Ident> {
    match trees {
        [TokenTree::Punct(first), TokenTree::Punct(second), TokenTree::Ident(ident), ..]
            if first.as_char() == ':' && first.spacing() == Spacing::Joint && second.as_char() == ':' =>
        {
            Some(ident)
        }
        _ => None,
    }
}

impl<'ast> Visit<'ast> for Collector {
    fn visit_item(&mut self, item: &'ast Item) {
        self.with_attributes(item_attributes(item), item, |collector| visit::visit_item(collector, item));
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        self.with_attributes(impl_item_attributes(item), item, |collector| visit::visit_impl_item(collector, item));
    }

    fn visit_trait_item(&mut self, item: &'ast TraitItem) {
        self.with_attributes(trait_item_attributes(item), item, |collector| visit::visit_trait_item(collector, item));
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        self.with_attributes(&local.attrs, local, |collector| visit::visit_local(collector, local));
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        self.with_attributes(&field.attrs, field, |collector| {
            if let Some(ident) = &field.ident {
                collector.define(ident, DefinitionKind::Field);
            }
            visit::visit_field(collector, field);
        });
    }

    fn visit_variant(&mut self, variant: &'ast syn::Variant) {
        self.with_attributes(&variant.attrs, variant, |collector| {
            collector.define(&variant.ident, DefinitionKind::Variant);
            visit::visit_variant(collector, variant);
        });
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        self.with_attributes(&arm.attrs, arm, |collector| visit::visit_arm(collector, arm));
    }

    fn visit_field_value(&mut self, value: &'ast syn::FieldValue) {
        self.with_attributes(&value.attrs, value, |collector| visit::visit_field_value(collector, value));
    }

    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        self.define(&module.ident, DefinitionKind::Module);
        let name = module.ident.unraw().to_string();
        if module.content.is_none() {
            self.collected.declarations.push(ModuleDeclaration {
                inline_modules: self.inline_modules.clone(),
                name: name.clone(),
                path: module.attrs.iter().find_map(path_attribute),
                test_only: self.test_only,
            });
        }
        self.inline_modules.push(name);
        visit::visit_item_mod(self, module);
        self.inline_modules.pop();
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.add_use_tree(&item.tree, &[]);
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.define(&item.ident, DefinitionKind::Type);
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.define(&item.ident, DefinitionKind::Type);
        visit::visit_item_enum(self, item);
    }

    fn visit_item_union(&mut self, item: &'ast syn::ItemUnion) {
        self.define(&item.ident, DefinitionKind::Type);
        visit::visit_item_union(self, item);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.define(&item.ident, DefinitionKind::Type);
        visit::visit_item_trait(self, item);
    }

    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.define(&item.ident, DefinitionKind::Type);
        visit::visit_item_type(self, item);
    }

    fn visit_trait_item_type(&mut self, item: &'ast syn::TraitItemType) {
        self.define(&item.ident, DefinitionKind::AssociatedType);
        visit::visit_trait_item_type(self, item);
    }

    fn visit_item_const(&mut self, item: &'ast syn::ItemConst) {
        self.define(&item.ident, DefinitionKind::Constant);
        visit::visit_item_const(self, item);
    }

    fn visit_item_static(&mut self, item: &'ast syn::ItemStatic) {
        self.define(&item.ident, DefinitionKind::Constant);
        visit::visit_item_static(self, item);
    }

    fn visit_impl_item_const(&mut self, item: &'ast syn::ImplItemConst) {
        self.define(&item.ident, DefinitionKind::Constant);
        visit::visit_impl_item_const(self, item);
    }

    fn visit_trait_item_const(&mut self, item: &'ast syn::TraitItemConst) {
        self.define(&item.ident, DefinitionKind::Constant);
        visit::visit_trait_item_const(self, item);
    }

    fn visit_item_macro(&mut self, item: &'ast syn::ItemMacro) {
        if let Some(ident) = &item.ident {
            self.define(ident, DefinitionKind::Function);
        }
        visit::visit_item_macro(self, item);
    }

    fn visit_signature(&mut self, signature: &'ast syn::Signature) {
        self.define(&signature.ident, DefinitionKind::Function);
        visit::visit_signature(self, signature);
    }

    fn visit_fn_arg(&mut self, argument: &'ast syn::FnArg) {
        self.is_in_parameters = true;
        visit::visit_fn_arg(self, argument);
        self.is_in_parameters = false;
    }

    fn visit_pat_ident(&mut self, pattern: &'ast syn::PatIdent) {
        // A name in capitals is a constant or a unit struct that is compared with.
        if !pattern.ident.unraw().to_string().starts_with(char::is_uppercase) {
            let parameter = self.is_in_parameters;
            let kind = if parameter { DefinitionKind::Parameter } else { DefinitionKind::Variable };
            self.define(&pattern.ident, kind);
        }
        visit::visit_pat_ident(self, pattern);
    }

    fn visit_block(&mut self, block: &'ast syn::Block) {
        self.function_depth += 1;
        visit::visit_block(self, block);
        self.function_depth -= 1;
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if let (Some(first), true) = (path.segments.first(), path.segments.len() > 1) {
            let segments = path.segments.iter().map(|segment| segment.ident.unraw().to_string()).collect();
            self.add_path(first.ident.span().start().line, segments, None);
        }
        visit::visit_path(self, path);
    }

    /// `pub(in path)` is no use of what the path names.
    fn visit_vis_restricted(&mut self, _: &'ast syn::VisRestricted) {}

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        let outer = std::mem::replace(&mut self.is_in_attribute, true);
        visit::visit_attribute(self, attribute);
        self.is_in_attribute = outer;
    }

    fn visit_token_stream(&mut self, stream: &'ast TokenStream) {
        self.add_tokens(stream);
    }
}

/// `#[cfg(test)]`, also as a part of `all(…)`; `#[test]`, `#[tokio::test]`, `#[tokio::test(…)]`.
fn is_test_attribute(attribute: &Attribute) -> bool {
    if attribute.path().is_ident("cfg") {
        let Meta::List(list) = &attribute.meta else { return false };
        return requires_test(list.tokens.clone());
    }
    attribute.path().segments.last().is_some_and(|segment| segment.ident == "test")
}

/// Whether the condition holds in test builds only: `test`, or `all(…)` of which one part requires it.
fn requires_test(condition: TokenStream) -> bool {
    let trees: Vec<TokenTree> = condition.into_iter().collect();
    let is_ident = |tree: &TokenTree, word: &str| matches!(tree, TokenTree::Ident(ident) if ident == word);
    trees.split(|tree| matches!(tree, TokenTree::Punct(punct) if punct.as_char() == ',')).any(|part| match part {
        [word] => is_ident(word, "test"),
        [word, TokenTree::Group(group)] if group.delimiter() == Delimiter::Parenthesis => {
            is_ident(word, "all") && requires_test(group.stream())
        }
        _ => false,
    })
}

fn path_attribute(attribute: &Attribute) -> Option<String> {
    let Meta::NameValue(pair) = &attribute.meta else { return None };
    let syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(path), .. }) = &pair.value else { return None };
    pair.path.is_ident("path").then(|| path.value())
}

fn item_attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

fn impl_item_attributes(item: &ImplItem) -> &[Attribute] {
    match item {
        ImplItem::Const(item) => &item.attrs,
        ImplItem::Fn(item) => &item.attrs,
        ImplItem::Type(item) => &item.attrs,
        ImplItem::Macro(item) => &item.attrs,
        _ => &[],
    }
}

fn trait_item_attributes(item: &TraitItem) -> &[Attribute] {
    match item {
        TraitItem::Const(item) => &item.attrs,
        TraitItem::Fn(item) => &item.attrs,
        TraitItem::Type(item) => &item.attrs,
        TraitItem::Macro(item) => &item.attrs,
        _ => &[],
    }
}
