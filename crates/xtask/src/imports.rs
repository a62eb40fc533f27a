//! Imports run one way: between the modules of a folder there is no cycle.
//!
//! Where a file of module `a` names something of its sibling `b`, `a` imports `b`. Tests don't count, and
//! neither does what a module and its own submodules import of each other. Cargo refuses cycles of crates.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Item, UseTree, Visibility};

use crate::links::{Texts, read};

/// Cycles that are still there: the crate, the module whose submodules they are, and these. The list only gets
/// shorter.
const KNOWN: [(&str, &str, &[&str]); 7] = [
    ("coord-conformance", "", &["case", "cx"]),
    ("coord-conformance", "", &["report", "suite"]),
    ("coord-core", "memory", &["discovery", "lease", "placement", "store", "watch"]),
    ("coord-core", "session", &["builder", "driver"]),
    ("coord-core", "types", &["node", "shard", "shard_load"]),
    ("coord-core", "wire", &["key", "manifest", "part", "records"]),
    ("coord-sim", "", &["invariants", "ledger", "mail", "peers", "process"]),
];

/// A module by its names from the crate on; the crate itself is empty.
type Module = Vec<String>;

/// The modules of one crate, and what they import.
#[derive(Default)]
struct Graph {
    modules: BTreeSet<Module>,
    /// What a module names, whole: a module, or something in it.
    named: BTreeMap<Module, BTreeSet<Module>>,
    /// Where a name comes from that a module exports again.
    exported: BTreeMap<(Module, String), Module>,
}

/// Reads one file. Its module is known from its path.
struct Reader<'a> {
    graph: &'a mut Graph,
    module: Module,
}

impl Reader<'_> {
    /// Takes in a path as it is written here.
    fn name(&mut self, path: &[String]) -> Option<Module> {
        let mut whole = match path.first()?.as_str() {
            "crate" => Module::new(),
            "self" => self.module.clone(),
            "super" => self.module[..self.module.len().checked_sub(1)?].to_vec(),
            first => {
                let mut child = self.module.clone();
                child.push(first.to_owned());
                if !self.graph.modules.contains(&child) {
                    return None;
                }
                child
            }
        };
        for name in &path[1..] {
            match name.as_str() {
                "super" => drop(whole.pop()?),
                name => whole.push(name.to_owned()),
            }
        }
        self.graph.named.entry(self.module.clone()).or_default().insert(whole.clone());
        Some(whole)
    }

    fn import(&mut self, tree: &UseTree, before: &mut Vec<String>, exports: bool) {
        let length = before.len();
        match tree {
            UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.import(&path.tree, before, exports);
            }
            UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.import(tree, before, exports));
            }
            UseTree::Name(name) if name.ident == "self" => drop(self.name(before)),
            UseTree::Name(name) => self.leaf(&name.ident, &name.ident, before, exports),
            UseTree::Rename(name) => self.leaf(&name.ident, &name.rename, before, exports),
            UseTree::Glob(_) => drop(self.name(before)),
        }
        before.truncate(length);
    }

    fn leaf(
        &mut self,
        name: &syn::Ident,
        called: &syn::Ident,
        before: &mut Vec<String>,
        exports: bool,
    ) {
        before.push(name.to_string());
        if let Some(whole) = self.name(before)
            && exports
        {
            self.graph.exported.insert((self.module.clone(), called.to_string()), whole);
        }
        before.pop();
    }

    /// The paths in what a macro is given, which is not parsed.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) if colons == 2 => path.push(ident.to_string()),
                TokenTree::Ident(ident) => {
                    self.name(&path);
                    path = vec![ident.to_string()];
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => {
                    colons += 1;
                    continue;
                }
                TokenTree::Group(group) => {
                    self.name(&path);
                    path.clear();
                    self.tokens(group.stream());
                }
                _ => {
                    self.name(&path);
                    path.clear();
                }
            }
            colons = 0;
        }
        self.name(&path);
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if is_for_tests(attributes(item)) {
            return;
        }
        match item {
            Item::Mod(inner) => {
                self.module.push(inner.ident.to_string());
                self.graph.modules.insert(self.module.clone());
                visit::visit_item_mod(self, inner);
                self.module.pop();
            }
            Item::Use(import) => {
                let exports = !matches!(import.vis, Visibility::Inherited);
                self.import(&import.tree, &mut Vec::new(), exports);
            }
            item => visit::visit_item(self, item),
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<String> = path.segments.iter().map(|s| s.ident.to_string()).collect();
        if names.len() > 1 {
            self.name(&names);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.tokens(call.tokens.clone());
        visit::visit_macro(self, call);
    }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Mod(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        _ => &[],
    }
}

fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<syn::Path>().is_ok_and(|path| path.is_ident("test"))
    })
}

impl Graph {
    fn of(files: &BTreeMap<Module, &str>) -> Self {
        let mut graph = Self { modules: files.keys().cloned().collect(), ..Self::default() };
        for (module, text) in files {
            let file = syn::parse_file(text).unwrap_or_else(|error| panic!("{module:?}: {error}"));
            Reader { graph: &mut graph, module: module.clone() }.visit_file(&file);
        }
        graph
    }

    /// The module that something is in, seen through what is exported again.
    fn home(&self, whole: &[String]) -> Module {
        let (mut whole, mut rounds) = (whole.to_vec(), 0);
        loop {
            let is_module = |length: &usize| self.modules.contains(&whole[..*length]);
            let length = (0..=whole.len()).rev().find(is_module).unwrap_or(0);
            let next = whole.get(length).map(|name| (whole[..length].to_vec(), name.clone()));
            match next.and_then(|name| self.exported.get(&name)) {
                Some(from) if rounds < 8 && *from != whole => whole.clone_from(from),
                _ => return whole[..length].to_vec(),
            }
            rounds += 1;
        }
    }

    /// What siblings import of each other: by the module that they are in, and who imports whom, with the name.
    fn siblings(&self) -> BTreeMap<Module, BTreeMap<(String, String), BTreeSet<String>>> {
        let mut siblings: BTreeMap<Module, BTreeMap<_, BTreeSet<_>>> = BTreeMap::new();
        for (from, named) in &self.named {
            for whole in named {
                let to = self.home(whole);
                let shared = from.iter().zip(&to).take_while(|(one, two)| one == two).count();
                if let (Some(one), Some(two)) = (from.get(shared), to.get(shared)) {
                    let imports = siblings.entry(from[..shared].to_vec()).or_default();
                    let import = format!("{} imports {}", from.join("::"), whole.join("::"));
                    imports.entry((one.clone(), two.clone())).or_default().insert(import);
                }
            }
        }
        siblings
    }

    /// The cycles: the module that they are in, the siblings in one, and the imports that close it.
    fn cycles(&self) -> Vec<(Module, BTreeSet<String>, Vec<String>)> {
        let mut cycles = Vec::new();
        for (parent, imports) in self.siblings() {
            let mut left: BTreeSet<&String> = imports.keys().map(|(one, _)| one).collect();
            while let Some(first) = left.pop_first() {
                let ahead = reached(first, imports.keys());
                let all: BTreeSet<String> = ahead
                    .into_iter()
                    .filter(|other| reached(other, imports.keys()).contains(first))
                    .cloned()
                    .collect();
                left.retain(|other| !all.contains(*other));
                if !all.is_empty() {
                    let within = imports
                        .iter()
                        .filter(|((one, two), _)| all.contains(one) && all.contains(two));
                    let imports = within.flat_map(|(_, imports)| imports.iter().cloned()).collect();
                    cycles.push((parent.clone(), all, imports));
                }
            }
        }
        cycles
    }
}

/// All that one module imports, over others too.
fn reached<'a>(
    first: &String,
    imports: impl Iterator<Item = &'a (String, String)> + Clone,
) -> BTreeSet<&'a String> {
    let mut reached = BTreeSet::new();
    let mut next = vec![first];
    while let Some(one) = next.pop() {
        for (_, two) in imports.clone().filter(|(from, _)| from == one) {
            if reached.insert(two) {
                next.push(two);
            }
        }
    }
    reached
}

/// The module of a file below `src`; none for tests and for programs beside the library.
fn module_of(path: &Path) -> Option<Module> {
    let mut names: Module =
        path.with_extension("").iter().map(|name| name.to_string_lossy().into_owned()).collect();
    match names.last()?.as_str() {
        "lib" | "main" | "mod" => drop(names.pop()),
        _ => {}
    }
    let is_left_out = |name: &String| name == "tests" || name == "bin";
    (!names.iter().any(is_left_out)).then_some(names)
}

/// The files of each crate, by their modules.
fn crates(texts: &Texts) -> BTreeMap<String, BTreeMap<Module, &str>> {
    let mut crates: BTreeMap<String, BTreeMap<Module, &str>> = BTreeMap::new();
    for (path, text) in texts {
        let mut parts = path.iter().map(|part| part.to_string_lossy().into_owned());
        let (Some(folder), Some(name), Some(source)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        if folder == "crates" && source == "src" && path.extension().is_some_and(|e| e == "rs") {
            let below: std::path::PathBuf = parts.collect();
            if let Some(module) = module_of(&below) {
                crates.entry(name).or_default().insert(module, text);
            }
        }
    }
    crates
}

#[test]
fn imports_run_one_way() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut texts = Texts::new();
    read(&root, Path::new(""), &mut texts);
    let mut said = String::new();
    let mut known: Vec<_> = KNOWN.to_vec();
    for (name, files) in crates(&texts) {
        for (parent, modules, imports) in Graph::of(&files).cycles() {
            let parent = parent.join("::");
            let position = known.iter().position(|(krate, module, cycle)| {
                (*krate, *module) == (name.as_str(), parent.as_str()) && modules.iter().eq(*cycle)
            });
            if let Some(position) = position {
                known.remove(position);
                continue;
            }
            let imports = imports.join("\n  ");
            writeln!(said, "{name} {parent}: {modules:?} are one cycle:\n  {imports}")
                .expect("text");
        }
    }
    assert!(said.is_empty(), "{said}");
    assert!(known.is_empty(), "these cycles are gone, or smaller: {known:?}");
}

#[test]
fn a_cycle_is_found_with_the_imports_that_close_it() {
    let files = [
        ("", "mod a;\nmod b;\nmod c;\npub use a::Thing;"),
        ("a", "pub struct Thing;\n#[cfg(test)]\nuse crate::c::Late;"),
        ("b", "use super::c::Late;\nfn f() -> crate::Thing { crate::Thing }"),
        ("c", "pub struct Late;\nfn f() { select!({ crate::b::f() }) }"),
        ("c::d", "use crate::c::e;"),
        ("c::e", ""),
    ];
    let split =
        |path: &str| path.split("::").filter(|s| !s.is_empty()).map(str::to_owned).collect();
    let files: BTreeMap<Module, &str> =
        files.into_iter().map(|(path, text)| (split(path), text)).collect();
    let cycles = Graph::of(&files).cycles();
    let [(parent, modules, imports)] = &cycles[..] else { panic!("{cycles:?}") };
    assert!(parent.is_empty());
    assert_eq!(modules.iter().map(String::as_str).collect::<Vec<_>>(), ["b", "c"]);
    assert_eq!(imports, &["b imports c::Late", "c imports b::f"]);
}
