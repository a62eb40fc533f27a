//! Layers of settings, the stronger one over the weaker.

/// Puts a variable where it belongs: those of downing into its table, and there those of its strategy
/// and its detector into theirs.
pub(super) fn put(layer: &mut toml::Table, key: &str, value: toml::Value) {
    let path: &[&str] = match key.strip_prefix("downing_") {
        None => &[key],
        Some("strategy") => &["downing", "strategy", "kind"],
        Some("detector") => &["downing", "detector", "kind"],
        Some(key @ ("limit" | "threshold")) => &["downing", "detector", key],
        Some(
            key @ ("quorum" | "referee" | "down_if_alone" | "minority_delay" | "patience"
            | "release_after"),
        ) => &["downing", "strategy", key],
        Some(key) => &["downing", key],
    };
    let mut value = value;
    let Some((first, rest)) = path.split_first() else { return };
    for key in rest.iter().rev() {
        value = toml::Table::from_iter([((*key).to_owned(), value)]).into();
    }
    merge(layer, toml::Table::from_iter([((*first).to_owned(), value)]));
}

/// Takes over what the layer holds, and of a table in it only what that holds; but another kind of thing
/// has other fields.
pub(super) fn merge(all: &mut toml::Table, layer: toml::Table) {
    for (key, value) in layer {
        match (all.get_mut(&key), value) {
            (Some(toml::Value::Table(old)), toml::Value::Table(new)) if !is_another(old, &new) => {
                merge(old, new);
            }
            (_, value) => {
                all.insert(key, value);
            }
        }
    }
}

fn is_another(old: &toml::Table, new: &toml::Table) -> bool {
    new.get("kind").is_some_and(|kind| old.get("kind").is_some_and(|old| old != kind))
}

/// The value that a variable's text stands for: a number or a truth value where it reads as one.
pub(super) fn scalar(text: &str) -> toml::Value {
    if let Ok(number) = text.parse::<i64>() {
        return toml::Value::Integer(number);
    }
    if let Ok(number) = text.parse::<f64>() {
        return toml::Value::Float(number);
    }
    match text {
        "true" => toml::Value::Boolean(true),
        "false" => toml::Value::Boolean(false),
        _ => toml::Value::String(text.to_owned()),
    }
}
