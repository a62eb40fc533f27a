//! What the demo shows: a frame that is drawn over itself in a terminal, lines elsewhere, JSON for
//! programs.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::time::Duration;

use crossterm::style::{Color, Stylize as _};
use crossterm::{cursor, queue, terminal};
use serde::Serialize;

/// How many of the newest events stay in the frame.
const LOG_LINES: usize = 8;
/// The longest bar, in characters.
const BAR_WIDTH_MAX: usize = 40;

/// A node as the frame shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct NodeLine {
    pub(crate) node: String,
    pub(crate) status: String,
    pub(crate) leader: bool,
    pub(crate) shards: u32,
}

/// Everything the frame shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) title: String,
    pub(crate) elapsed: Duration,
    pub(crate) step: String,
    pub(crate) term: Option<u64>,
    pub(crate) version: u64,
    pub(crate) shards: u32,
    pub(crate) orphans: u32,
    pub(crate) nodes: Vec<NodeLine>,
    pub(crate) log: VecDeque<(Duration, String)>,
}

impl Frame {
    /// Adds a line to the log, which keeps the newest few.
    pub(crate) fn note(&mut self, at: Duration, line: String) {
        self.log.push_back((at, line));
        while self.log.len() > LOG_LINES {
            self.log.pop_front();
        }
    }

    /// The frame as lines of at most `width` characters.
    pub(crate) fn lines(&self, width: usize, colour: bool) -> Vec<String> {
        let paint = |text: String, tint: Color| {
            if colour { text.with(tint).to_string() } else { text }
        };
        let mut lines = vec![
            paint(clip(&format!("{}  {}", stamp(self.elapsed), self.title), width), Color::Cyan),
            clip(&self.headline(), width),
            paint(clip(&format!("> {}", self.step), width), Color::Yellow),
            String::new(),
        ];
        lines.extend(self.nodes.iter().map(|node| {
            let tint = match node.status.as_str() {
                "active" if node.leader => Color::Green,
                "active" => Color::Blue,
                _ => Color::Red,
            };
            paint(clip(&self.node_line(node, width), width), tint)
        }));
        lines.push(String::new());
        lines.extend(
            self.log.iter().map(|(at, line)| clip(&format!("{}  {line}", stamp(*at)), width)),
        );
        lines
    }

    /// The frame in at most `height` lines: nodes are folded and old events left out as needed, and a
    /// frame taller than the terminal could not be drawn over.
    fn fitted(&self, width: usize, height: usize, colour: bool) -> Vec<String> {
        const FIXED: usize = 5;
        const LOG_MIN: usize = 3;
        let room = height.saturating_sub(FIXED);
        let for_nodes = room.saturating_sub(LOG_MIN.min(self.log.len())).max(1);
        let mut shown = self.clone();
        let folded = (self.nodes.len() > for_nodes).then(|| {
            // The leader stays in sight.
            shown.nodes.sort_by_key(|node| !node.leader);
            shown.nodes.truncate(for_nodes - 1);
            self.nodes.len() - shown.nodes.len()
        });
        let lines_of_nodes = shown.nodes.len() + usize::from(folded.is_some());
        while shown.log.len() > room.saturating_sub(lines_of_nodes) {
            shown.log.pop_front();
        }
        let mut lines = shown.lines(width, colour);
        // Who leads is told also where there is no line for its node.
        lines[1] = clip(&self.headline(), width);
        if let Some(folded) = folded {
            lines.insert(4 + shown.nodes.len(), format!("  … and {folded} more"));
        }
        lines.truncate(height);
        lines
    }

    fn headline(&self) -> String {
        format!("{}  {}", self.leadership(), self.assignment())
    }

    fn leadership(&self) -> String {
        let leader = self.nodes.iter().find(|node| node.leader);
        match (leader, self.term) {
            (Some(node), Some(term)) => format!("{} leads in term {term}", node.node),
            _ => "nobody leads".to_owned(),
        }
    }

    fn assignment(&self) -> String {
        match self.orphans {
            0 => format!("map version {}, all {} shards assigned", self.version, self.shards),
            orphans => format!(
                "map version {}, {orphans} of {} shards orphaned",
                self.version, self.shards
            ),
        }
    }

    fn node_line(&self, node: &NodeLine, width: usize) -> String {
        let name_width = self.nodes.iter().map(|node| node.node.len()).max().unwrap_or(0);
        let mark = if node.leader { '*' } else { ' ' };
        // The fixed part of the line is name, mark, status and count; the bar takes what is left.
        let room = width.saturating_sub(name_width + 24).min(BAR_WIDTH_MAX);
        let most = self.nodes.iter().map(|node| node.shards).max().unwrap_or(0).max(1);
        let filled = (node.shards as usize * room).div_ceil(most as usize);
        let bar = "█".repeat(filled);
        format!("{mark} {:name_width$}  {:<10} {:>6}  {bar}", node.node, node.status, node.shards)
    }
}

/// Draws frames over each other.
#[derive(Debug, Default)]
pub(crate) struct Screen {
    drawn: Vec<String>,
}

impl Screen {
    /// Draws the frame in the place of the one before, in one write, unless it is the same.
    pub(crate) fn draw(&mut self, frame: &Frame) -> io::Result<()> {
        let (columns, rows) = terminal::size().unwrap_or((80, 24));
        let (columns, rows) = (usize::from(columns.max(20)) - 1, usize::from(rows.max(8)) - 1);
        let lines = frame.fitted(columns, rows, colour_wanted());
        if lines == self.drawn {
            return Ok(());
        }
        let mut out = Vec::new();
        if let Ok(up @ 1..) = u16::try_from(self.drawn.len()) {
            queue!(out, cursor::MoveUp(up))?;
        }
        for line in &lines {
            // The rest of a line goes after its text was written, so that nothing flickers.
            write!(out, "{line}")?;
            queue!(out, terminal::Clear(terminal::ClearType::UntilNewLine))?;
            writeln!(out)?;
        }
        queue!(out, terminal::Clear(terminal::ClearType::FromCursorDown))?;
        self.drawn = lines;
        let mut terminal = io::stdout().lock();
        terminal.write_all(&out)?;
        terminal.flush()
    }
}

/// Minutes, seconds and tenths.
pub(crate) fn stamp(elapsed: Duration) -> String {
    let tenths = elapsed.as_millis() / 100;
    format!("{}:{:02}.{}", tenths / 600, tenths / 10 % 60, tenths % 10)
}

/// Colour unless the user has said no, by the convention of no-color.org.
fn colour_wanted() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

fn clip(line: &str, width: usize) -> String {
    line.chars().take(width).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame() -> Frame {
        let node = |name: &str, status: &str, leader, shards| NodeLine {
            node: name.into(),
            status: status.into(),
            leader,
            shards,
        };
        let mut frame = Frame {
            title: "coord demo".into(),
            elapsed: Duration::from_millis(61_250),
            step: "the leader is killed".into(),
            term: Some(7),
            version: 3,
            shards: 1024,
            orphans: 0,
            nodes: vec![
                node("n1", "failed", false, 0),
                node("n2", "active", true, 342),
                node("n3", "active", false, 341),
            ],
            log: VecDeque::new(),
        };
        frame.note(Duration::from_secs(1), "n2 leads".into());
        frame
    }

    #[test]
    fn a_frame_shows_leader_bars_and_log() {
        let lines = frame().lines(79, false);
        assert_eq!(lines[0], "1:01.2  coord demo");
        assert_eq!(lines[1], "n2 leads in term 7  map version 3, all 1024 shards assigned");
        assert_eq!(lines[4], "  n1  failed          0  ");
        assert_eq!(lines[5], format!("* n2  active        342  {}", "█".repeat(40)));
        assert!(lines.iter().all(|line| line.chars().count() <= 79));
        assert_eq!(lines.last().map(String::as_str), Some("0:01.0  n2 leads"));
    }

    #[test]
    fn a_low_terminal_still_says_who_leads() {
        for height in 1..=9 {
            let lines = frame().fitted(79, height, false);
            assert!(lines.len() <= height, "{lines:#?}");
            assert!(height < 2 || lines[1].starts_with("n2 leads in term 7"), "{lines:#?}");
        }
    }

    #[test]
    fn a_narrow_terminal_clips_and_the_log_is_bounded() {
        let mut frame = frame();
        for n in 0..100 {
            frame.note(Duration::from_secs(n), "x".repeat(200));
        }
        assert_eq!(frame.log.len(), LOG_LINES);
        assert!(frame.lines(20, false).iter().all(|line| line.chars().count() <= 20));
        frame.nodes = vec![frame.nodes[1].clone(); 64];
        let lines = frame.fitted(79, 23, false);
        assert_eq!(lines.len(), 23);
        assert!(lines.iter().any(|line| line.contains("… and 50 more")), "{lines:#?}");
        assert!(lines.last().is_some_and(|line| line.starts_with("1:39.0")), "{lines:#?}");
    }
}
