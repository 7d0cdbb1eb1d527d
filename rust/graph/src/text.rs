//! Edge lists as text: one edge per line, two nodes separated by blanks, a tab or a comma.
//!
//! A tab or comma beside which a node is missing is an error: what stands behind it may be a weight. Lines that are empty or
//! begin with `#` or `%` say nothing; further columns of a line (weights, times) are read over. Of a Matrix Market file, which says
//! so in its first line, the line of sizes is read over. Lines end with a line feed, a carriage return, or both; a byte order mark
//! before the first says nothing. Text comes in pieces of any size; a line that is no edge is an error with the name of the file and
//! the number of the line.

use crate::error::GraphError;

/// What nodes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ids {
    /// Numbers of 64 bits.
    Numbers,
    /// Texts.
    Texts,
}

/// An edge as it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edge<'a> {
    /// From, to.
    Numbers(u64, u64),
    /// From, to.
    Texts(&'a str, &'a str),
}

/// Gets the edges of a text.
pub type Each<'a> = &'a mut dyn FnMut(Edge<'_>) -> Result<(), GraphError>;

/// Longest line, bytes.
pub const LONGEST: usize = 1 << 20;

/// Reads one file.
#[derive(Debug)]
pub struct EdgeText {
    place: String,
    ids: Ids,
    line: u64,
    rest: Vec<u8>,
    /// Whether the last byte was a carriage return, of which a line feed is part.
    returned: bool,
    /// Whether the next line that says something has the sizes of a matrix.
    sizes: bool,
    edges: u64,
}

impl EdgeText {
    /// `place` is the name of the file, for errors.
    #[must_use]
    pub fn new(place: &str, ids: Ids) -> Self {
        Self { place: place.into(), ids, line: 0, rest: Vec::new(), returned: false, sizes: false, edges: 0 }
    }

    /// How many edges were read.
    #[must_use]
    pub fn edges(&self) -> u64 {
        self.edges
    }

    /// Reads a piece of the text; `each` gets the edges in it.
    ///
    /// # Errors
    /// [`GraphError::Line`] for a line that is no edge, or what `each` refuses; edges before it were given.
    pub fn push(&mut self, text: &[u8], each: Each<'_>) -> Result<(), GraphError> {
        let fed;
        let mut text = text;
        if text.contains(&b'\r') || self.returned {
            fed = self.with_line_feeds(text);
            text = &fed;
        }
        if !self.rest.is_empty() {
            let end = text.iter().position(|&byte| byte == b'\n').map_or(text.len(), |at| at + 1);
            self.rest.extend_from_slice(&text[..end]);
            text = &text[end..];
            if self.rest.last() != Some(&b'\n') {
                return self.bounded();
            }
            let whole = std::mem::take(&mut self.rest);
            self.lines(&whole, each)?;
        }
        let end = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        self.lines(&text[..end], each)?;
        self.rest.extend_from_slice(&text[end..]);
        self.bounded()
    }

    /// Reads the last line, which may have no end.
    ///
    /// # Errors
    /// As [`EdgeText::push`].
    pub fn finish(&mut self, each: Each<'_>) -> Result<(), GraphError> {
        let rest = std::mem::take(&mut self.rest);
        self.lines(&rest, each)
    }

    /// The same with a line feed at the end of each line.
    fn with_line_feeds(&mut self, text: &[u8]) -> Vec<u8> {
        let mut fed = Vec::with_capacity(text.len());
        for &byte in text {
            match byte {
                b'\n' if self.returned => {}
                b'\r' => fed.push(b'\n'),
                _ => fed.push(byte),
            }
            self.returned = byte == b'\r';
        }
        fed
    }

    fn bounded(&self) -> Result<(), GraphError> {
        if self.rest.len() <= LONGEST {
            return Ok(());
        }
        Err(self.wrong(self.line + 1, "it is longer than 1 MiB: this is no edge list".into()))
    }

    fn wrong(&self, line: u64, problem: String) -> GraphError {
        GraphError::Line { place: self.place.clone(), line, problem }
    }

    fn lines(&mut self, text: &[u8], each: Each<'_>) -> Result<(), GraphError> {
        if text.is_empty() {
            return Ok(());
        }
        for line in text.strip_suffix(b"\n").unwrap_or(text).split(|&byte| byte == b'\n') {
            let mark = if self.line == 0 { &b"\xef\xbb\xbf"[..] } else { b"" };
            let line = line.strip_prefix(mark).unwrap_or(line);
            self.line += 1;
            let separates = |byte: &u8| matches!(byte, b' ' | b'\t' | b',');
            let mut words = line.split(separates).filter(|word| !word.is_empty());
            let first = words.next().unwrap_or_default();
            if matches!(first, [] | [b'#' | b'%', ..]) && !line.trim_ascii_start().starts_with(b",") {
                self.sizes |= self.line == 1 && line.starts_with(b"%%MatrixMarket");
                continue;
            }
            if std::mem::take(&mut self.sizes) {
                continue;
            }
            let gap = || {
                let told =
                    format!("{:?} lacks a node beside a tab or comma; fill it in, or leave out the line", shown(line));
                Err(self.wrong(self.line, told))
            };
            if first.is_empty() {
                return gap();
            }
            let Some(second) = words.next() else {
                return Err(self.wrong(self.line, format!("{:?} is one node; an edge has two", shown(first))));
            };
            let place = |word: &[u8]| word.as_ptr() as usize - line.as_ptr() as usize;
            let (before, between) = (&line[..place(first)], &line[place(first) + first.len()..place(second)]);
            if !are_blanks(before) || between.len() > 1 && is_gap(between) {
                return gap();
            }
            each(match self.ids {
                Ids::Numbers => Edge::Numbers(self.number(first)?, self.number(second)?),
                Ids::Texts => Edge::Texts(self.text(first)?, self.text(second)?),
            })?;
            self.edges += 1;
        }
        Ok(())
    }

    fn number(&self, word: &[u8]) -> Result<u64, GraphError> {
        let digits = word.iter().try_fold(0_u64, |number, byte| {
            let digit = byte.wrapping_sub(b'0');
            if digit > 9 { None } else { number.checked_mul(10)?.checked_add(u64::from(digit)) }
        });
        digits.ok_or_else(|| {
            if let Some(rest) = word.strip_prefix(b"-")
                && !rest.is_empty()
                && rest.iter().all(u8::is_ascii_digit)
            {
                let advice = "numbers in files are 0 or more; give an Arrow table of them instead";
                return self.wrong(self.line, format!("node {:?} is negative: {advice}", shown(word)));
            }
            let problem = if word.iter().all(u8::is_ascii_digit) { "does not fit in 64 bits" } else { "is no number" };
            self.wrong(
                self.line,
                format!("node {:?} {problem}; nodes that are names are read by ids=\"text\"", shown(word)),
            )
        })
    }

    fn text<'a>(&self, word: &'a [u8]) -> Result<&'a str, GraphError> {
        std::str::from_utf8(word).map_err(|_| self.wrong(self.line, format!("node {:?} is not UTF-8", shown(word))))
    }
}

fn are_blanks(text: &[u8]) -> bool {
    text.iter().all(|&byte| byte == b' ')
}

/// Whether a field is missing in what stands between two words.
fn is_gap(between: &[u8]) -> bool {
    let count = |of: u8| between.iter().filter(|&&byte| byte == of).count();
    let commas = count(b',');
    commas > 1 || commas == 0 && count(b'\t') > 1
}

/// A word of the file as it is shown: not more than a line of it.
fn shown(word: &[u8]) -> String {
    let text = String::from_utf8_lossy(&word[..word.len().min(60)]).into_owned();
    if word.len() > 60 { text + "..." } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, step: usize, ids: Ids) -> Result<Vec<(String, String)>, GraphError> {
        let mut edges = Vec::new();
        let mut each = |edge: Edge<'_>| {
            edges.push(match edge {
                Edge::Numbers(from, to) => (from.to_string(), to.to_string()),
                Edge::Texts(from, to) => (from.to_owned(), to.to_owned()),
            });
            Ok(())
        };
        let mut reader = EdgeText::new("g.txt", ids);
        for piece in text.as_bytes().chunks(step) {
            reader.push(piece, &mut each)?;
        }
        reader.finish(&mut each)?;
        assert_eq!(reader.edges() as usize, edges.len());
        Ok(edges)
    }

    #[test]
    fn lines_are_edges_however_the_text_is_cut() {
        let text = "# FromNode ToNode\r\n1\t2\r\n\n% more\n  3 4 0.5\n18446744073709551615,1\n7 8";
        for step in 1..text.len() {
            let edges = read(text, step, Ids::Numbers).unwrap();
            let wanted = [("1", "2"), ("3", "4"), ("18446744073709551615", "1"), ("7", "8")];
            assert_eq!(edges, wanted.map(|(from, to)| (from.to_owned(), to.to_owned())), "in steps of {step}");
        }
        let old = "\u{feff}1 2\r\r3 4\r\n\n5 6\n\r7 8\r";
        for step in 1..old.len() {
            let edges = read(old, step, Ids::Numbers).unwrap();
            let wanted = [("1", "2"), ("3", "4"), ("5", "6"), ("7", "8")];
            assert_eq!(edges, wanted.map(|(from, to)| (from.to_owned(), to.to_owned())), "in steps of {step}");
        }
        assert_eq!(read("ann bob\nbob ann\n", 3, Ids::Texts).unwrap().len(), 2);
        let pairs = |text: &str| read(text, 5, Ids::Numbers).unwrap();
        let edge = |from: &str, to: &str| (from.to_owned(), to.to_owned());
        assert_eq!(pairs("1, 2\n1 ,2\n1,\t2,,7\n  1   2\t\t3\n1\t2"), vec![edge("1", "2"); 5]);
        let matrix = "%%MatrixMarket matrix coordinate pattern general\n% x\n\n100 100 2\n1 2\n2 3\n";
        assert_eq!(pairs(matrix), [edge("1", "2"), edge("2", "3")], "without the line of sizes");
        assert_eq!(pairs("% x\n%%MatrixMarket\n100 100\n"), [edge("100", "100")], "only in the first line");
        assert_eq!(read("", 1, Ids::Numbers).unwrap(), []);
    }

    #[test]
    fn a_line_that_is_no_edge_is_named() {
        for (text, says) in [
            ("1 2\n\n3\n", "g.txt, line 3: \"3\" is one node; an edge has two"),
            ("1 2\n1,,5\n", "g.txt, line 2: \"1,,5\" lacks a node beside a tab or comma; fill it in, or leave out"),
            ("1\t\t5\n", "g.txt, line 1: \"1\\t\\t5\" lacks a node"),
            (",1,2\n", "g.txt, line 1: \",1,2\" lacks a node"),
            ("\t1\t2\n", "lacks a node"),
            ("1, ,2\n", "lacks a node"),
            ("1 2\n , \n", "g.txt, line 2: \" , \" lacks a node"),
            (",#1,2\n", "lacks a node"),
            ("1 2\n3 x\n", "g.txt, line 2: node \"x\" is no number"),
            ("1 2\r\n3 4\r\n3 x\r\n", "g.txt, line 3: node \"x\" is no number"),
            ("1 2\r3 4\r3 x", "g.txt, line 3: node \"x\" is no number"),
            ("1 -2", "g.txt, line 1: node \"-2\" is negative: numbers in files are 0 or more; give an Arrow table"),
            ("18446744073709551616 1", "g.txt, line 1: node \"18446744073709551616\" does not fit in 64 bits"),
        ] {
            for step in [1, 4, 100] {
                let message = read(text, step, Ids::Numbers).expect_err(text).to_string();
                assert!(message.contains(says), "{text:?} gives {message:?}");
            }
        }
        let long = vec![b'1'; LONGEST + 2];
        let error = EdgeText::new("g", Ids::Numbers).push(&long, &mut |_| Ok(())).unwrap_err();
        assert!(error.to_string().contains("line 1: it is longer than 1 MiB"), "{error}");
    }
}
