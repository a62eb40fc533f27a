//! Samples and the tables made of them.

use std::time::Duration;

/// Times in seconds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    pub(crate) fn add(&mut self, time: Duration) {
        self.0.push(time.as_secs_f64());
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// The smallest sample that this share of all is not above.
    pub(crate) fn at(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let places = sorted.len().saturating_sub(1);
        let place = (places as f64 * share).ceil();
        let nearest = (0..=places).find(|&index| index as f64 >= place).unwrap_or(0);
        sorted.get(nearest).copied().unwrap_or(f64::NAN)
    }

    pub(crate) fn max(&self) -> f64 {
        self.at(1.0)
    }
}

pub(crate) fn seconds(time: f64) -> String {
    match time {
        t if t.is_nan() => "-".to_owned(),
        t if t.abs() < 1.0 => format!("{:.2} ms", t * 1e3),
        t => format!("{t:.2} s"),
    }
}

/// A table in Markdown, printed as it grows.
pub(crate) fn head(title: &str, columns: &[&str]) {
    println!("\n## {title}\n");
    row(columns.iter().map(|&column| column.to_owned()));
    row(columns.iter().map(|_| "---".to_owned()));
}

pub(crate) fn row(cells: impl IntoIterator<Item = String>) {
    println!("| {} |", cells.into_iter().collect::<Vec<_>>().join(" | "));
}
