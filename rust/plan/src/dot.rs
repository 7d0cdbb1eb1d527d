//! A plan as a drawing, in the language of Graphviz.
//!
//! Nodes are sources, the steps without state of each inlet, operators with what they keep, and the output; edges are the ways of rows, bold where these
//! are exchanged between workers, dashed to side outputs. Names of nodes say what they are of: `source0`, `inlet1_0` (stage and side), `stage1`.

use std::fmt::Write;

use crate::chain::Stateless;
use crate::ddl::columns;
use crate::explain::{chain, exchange, operator};
use crate::plan::{Inlet, Origin, Plan, Stage};
use crate::spec::SideSpec;

pub(crate) fn dot(plan: &Plan) -> String {
    let mut drawing = Drawing(String::from("digraph flow {\n  node [shape=box, fontname=monospace];\n"), 0);
    for (number, source) in plan.sources().iter().enumerate() {
        let named = if plan.sources().len() > 1 { format!("source {}", source.name) } else { "source".to_owned() };
        drawing.node(&format!("source{number}"), "shape=oval, ", &[named, columns(&source.schema)]);
    }
    for (number, stage) in plan.stages().iter().enumerate() {
        if let Some(keyed) = &stage.keyed {
            let (what, state) = operator(plan, keyed);
            let lines = [format!("{}: {what}", keyed.step), format!("state: {state}; in bins, movable")];
            drawing.node(&format!("stage{number}"), "peripheries=2, ", &lines);
            drawing.sides(&format!("stage{number}"), keyed.sides());
        }
        for (side, inlet) in stage.inlets.iter().enumerate() {
            drawing.inlet(number, stage, side, inlet);
        }
    }
    drawing.node("output", "shape=oval, ", &["output".to_owned(), columns(plan.output_schema())]);
    drawing.edge(&format!("stage{}", plan.stages().len() - 1), "output", None);
    drawing.0.push_str("}\n");
    drawing.0
}

/// With the number of sides that it has.
struct Drawing(String, usize);

impl Drawing {
    fn line(&mut self, words: &str) {
        // Writing to a string cannot fail.
        writeln!(self.0, "  {words};").unwrap_or_default();
    }

    fn node(&mut self, name: &str, style: &str, lines: &[String]) {
        let label: String = lines.iter().map(|line| format!("{}\\l", quoted(line))).collect();
        self.line(&format!("{name} [{style}label=\"{label}\"]"));
    }

    /// What goes beside the rows of a node.
    fn sides(&mut self, from: &str, sides: &[SideSpec]) {
        for side in sides {
            let name = format!("side{}", self.1);
            self.1 += 1;
            self.node(&name, "shape=oval, style=dashed, ", &[format!("side {}", side.name), columns(&side.schema)]);
            self.line(&format!("{from} -> {name} [style=dashed]"));
        }
    }

    /// The same of steps without state, those of bodies included.
    fn sides_of(&mut self, from: &str, steps: &[Stateless]) {
        for step in steps {
            match step {
                Stateless::Map(map) => self.sides(from, &map.sides),
                Stateless::FlatMap(flat) => self.sides(from, &flat.sides),
                Stateless::Bounded(part) => self.sides_of(from, &part.body),
                Stateless::Iterate(part) => self.sides_of(from, &part.body),
            }
        }
    }

    fn edge(&mut self, from: &str, to: &str, exchanged: Option<&str>) {
        let style = exchanged.map_or(String::new(), |by| format!(" [style=bold, label=\"exchange {}\"]", quoted(by)));
        self.line(&format!("{from} -> {to}{style}"));
    }

    /// The steps before an exchange, and the ways to and from them; without any, rows are exchanged as they come.
    fn inlet(&mut self, number: usize, stage: &Stage, side: usize, inlet: &Inlet) {
        let end = format!("stage{number}");
        let by = stage.keyed.as_ref().map(|keyed| match stage.inlets.len() {
            1 => exchange(keyed, side),
            _ => format!("{}, {}", ["left", "right"][side], exchange(keyed, side)),
        });
        let mut lines = Vec::new();
        chain(&inlet.pre, 0, &mut |line| lines.push(line));
        let steps = match &by {
            Some(_) if lines.is_empty() => None,
            Some(_) => Some(format!("inlet{number}_{side}")),
            None => Some(end.clone()),
        };
        if let Some(steps) = &steps {
            if lines.is_empty() {
                lines.push(if inlet.from.len() > 1 { "union" } else { "as it comes" }.to_owned());
            }
            self.node(steps, "", &lines);
            self.sides_of(steps, &inlet.pre);
        }
        for origin in &inlet.from {
            let from = match origin {
                Origin::Source(number) => format!("source{number}"),
                Origin::Stage(number) => format!("stage{number}"),
            };
            match &steps {
                Some(steps) => self.edge(&from, steps, None),
                None => self.edge(&from, &end, by.as_deref()),
            }
        }
        if let (Some(steps), Some(by)) = (&steps, &by) {
            self.edge(steps, &end, Some(by));
        }
    }
}

/// As it stands between quotes.
fn quoted(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\l")
}
