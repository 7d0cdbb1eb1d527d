//! A conjunctive pattern of binary relations: `tri(a, b, c) :- e(a, b), e(a, c), e(b, c)`.
//!
//! Owns: the grammar, the same thing as objects, and every check that needs no data. Invariants of a [`Pattern`]: each
//! atom has two variables, the body is connected, the head names variables of the body, none twice. One row per match:
//! a variable of the body that the head leaves out is bound all the same, so rows may repeat (as in SQL without DISTINCT).
//!
//! Grammar: `name ( variables ) :- name ( v , v ) {, name ( v , v )} [.]`; names are letters, digits and `_`, not
//! beginning with a digit; blanks are free. Places are counted in characters from 1.

use thiserror::Error;

/// One atom: `relation(from, to)`, with variables as numbers into [`Pattern::variables`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Atom {
    /// Name of the relation.
    pub relation: String,
    /// Variable at the start of the edge.
    pub from: usize,
    /// Variable at its end; the same one asks for self-loops.
    pub to: usize,
    /// Where it stands in the text, from 1; 0 when it was made of objects.
    pub place: usize,
}

/// A pattern that is right in itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// What the result is called.
    pub name: String,
    /// Variables in order of first appearance in the body.
    pub variables: Vec<String>,
    /// Columns of the result, as numbers of variables.
    pub head: Vec<usize>,
    /// What has to hold.
    pub body: Vec<Atom>,
}

/// What is wrong with a pattern, and where.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PatternError {
    /// The text is no pattern.
    #[error("pattern, character {place}: expected {wanted}, found {found}")]
    Syntax {
        /// Character, from 1.
        place: usize,
        /// What could stand there.
        wanted: &'static str,
        /// What does.
        found: String,
    },
    /// An atom that is not binary.
    #[error(
        "pattern, character {place}: {relation} has {count} variables; relations are binary, write {relation}(x, y)"
    )]
    Arity {
        /// Character, from 1.
        place: usize,
        /// The relation.
        relation: String,
        /// How many it was given.
        count: usize,
    },
    /// A relation that nobody gave.
    #[error("pattern{}: there is no relation {relation:?}; there are {known}", at(*place))]
    UnknownRelation {
        /// Character, from 1.
        place: usize,
        /// The relation.
        relation: String,
        /// Those that exist.
        known: String,
    },
    /// The head names a variable that the body does not bind.
    #[error("pattern, character {place}: no atom binds {variable:?}; use it in the body or leave it out of the head")]
    Unbound {
        /// Character, from 1.
        place: usize,
        /// The variable.
        variable: String,
    },
    /// The head names a variable twice.
    #[error("pattern, character {place}: {variable:?} is in the head already; name each column once")]
    RepeatedHead {
        /// Character, from 1.
        place: usize,
        /// The variable.
        variable: String,
    },
    /// The body falls apart: its matches would be a product.
    #[error(
        "pattern, character {place}: nothing joins {relation}({from}, {to}) to the rest, which would give every \
         combination; join them by a variable, or match them one after the other"
    )]
    Disconnected {
        /// Character, from 1.
        place: usize,
        /// Relation of the first atom that is not reached.
        relation: String,
        /// Its variables.
        from: String,
        /// Its variables.
        to: String,
    },
    /// The index is an undirected graph, each edge once, which answers nothing but cliques.
    #[error(
        "pattern{}: {problem}; an index with shape=\"degree\" or \"degeneracy\" is an undirected graph and answers cliques \
         only: each variable joined to every later one, and all of them in the head; build it with shape=\"both\", which \
         answers any pattern",
        at(*place)
    )]
    NoClique {
        /// Character, from 1; 0 where it is about the whole.
        place: usize,
        /// What keeps it from being a clique.
        problem: String,
    },
    /// More variables than a search has levels.
    #[error("pattern: {count} variables; there may be at most {most}")]
    TooManyVariables {
        /// How many there are.
        count: usize,
        /// How many there may be.
        most: usize,
    },
}

/// How a place in the text is told; 0: edges were given for a relation that the text does not have.
fn at(place: usize) -> String {
    if place == 0 { String::new() } else { format!(", character {place}") }
}

impl PatternError {
    /// The character of the text that it is about, from 1; 0 where there is none.
    #[must_use]
    pub fn place(&self) -> usize {
        match self {
            Self::Syntax { place, .. }
            | Self::Arity { place, .. }
            | Self::UnknownRelation { place, .. }
            | Self::Unbound { place, .. }
            | Self::RepeatedHead { place, .. }
            | Self::Disconnected { place, .. }
            | Self::NoClique { place, .. } => *place,
            Self::TooManyVariables { .. } => 0,
        }
    }
}

/// Most variables of a pattern.
pub const MOST_VARIABLES: usize = 32;

impl Pattern {
    /// Reads the text.
    ///
    /// # Errors
    /// [`PatternError`] with the place in the text.
    pub fn parse(text: &str) -> Result<Self, PatternError> {
        let mut reader = Reader { text: text.chars().collect(), at: 0 };
        let (name, _) = reader.name("the name of the result")?;
        let head = reader.variables()?;
        reader.symbol(":-", "\":-\"")?;
        let mut atoms = Vec::new();
        loop {
            let (relation, place) = reader.name("the name of a relation")?;
            let variables = reader.variables()?;
            let [from, to] = <[(String, usize); 2]>::try_from(variables).map_err(|all| PatternError::Arity {
                place,
                relation: relation.clone(),
                count: all.len(),
            })?;
            atoms.push((relation, from.0, to.0, place));
            if !reader.accept(",") {
                break;
            }
        }
        reader.accept(".");
        reader.end()?;
        Self::make(name, &head, atoms)
    }

    /// The same from objects: the columns of the result and atoms `(relation, from, to)`.
    ///
    /// # Errors
    /// As [`Pattern::parse`]; places are 0.
    pub fn new(name: &str, head: &[&str], atoms: &[(&str, &str, &str)]) -> Result<Self, PatternError> {
        let head = head.iter().map(|name| ((*name).to_owned(), 0)).collect::<Vec<_>>();
        let atoms =
            atoms.iter().map(|(relation, from, to)| ((*relation).to_owned(), (*from).to_owned(), (*to).to_owned(), 0));
        Self::make(name.to_owned(), &head, atoms.collect())
    }

    fn make(
        name: String,
        head: &[(String, usize)],
        atoms: Vec<(String, String, String, usize)>,
    ) -> Result<Self, PatternError> {
        if atoms.is_empty() {
            return Err(PatternError::Syntax { place: 0, wanted: "an atom", found: "nothing".into() });
        }
        let mut variables: Vec<String> = Vec::new();
        let mut number = |name: &String| match variables.iter().position(|known| known == name) {
            Some(at) => at,
            None => {
                variables.push(name.clone());
                variables.len() - 1
            }
        };
        let body = atoms
            .iter()
            .map(|(relation, from, to, place)| Atom {
                relation: relation.clone(),
                from: number(from),
                to: number(to),
                place: *place,
            })
            .collect::<Vec<_>>();
        if variables.len() > MOST_VARIABLES {
            return Err(PatternError::TooManyVariables { count: variables.len(), most: MOST_VARIABLES });
        }
        let mut columns = Vec::new();
        for (variable, place) in head {
            let at = variables.iter().position(|known| known == variable);
            let at = at.ok_or_else(|| PatternError::Unbound { place: *place, variable: variable.clone() })?;
            if columns.contains(&at) {
                return Err(PatternError::RepeatedHead { place: *place, variable: variable.clone() });
            }
            columns.push(at);
        }
        let mut reached = vec![false; variables.len()];
        reached[body[0].from] = true;
        for _ in 0..variables.len() {
            for atom in &body {
                if reached[atom.from] || reached[atom.to] {
                    (reached[atom.from], reached[atom.to]) = (true, true);
                }
            }
        }
        if let Some(apart) = body.iter().find(|atom| !reached[atom.from]) {
            return Err(PatternError::Disconnected {
                place: apart.place,
                relation: apart.relation.clone(),
                from: variables[apart.from].clone(),
                to: variables[apart.to].clone(),
            });
        }
        Ok(Self { name, variables, head: columns, body })
    }

    /// Names of the columns of the result.
    pub fn columns(&self) -> impl Iterator<Item = &str> {
        self.head.iter().map(|&at| self.variables[at].as_str())
    }

    /// The relations that it uses, each once, in order of appearance.
    #[must_use]
    pub fn relations(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for atom in &self.body {
            if !names.contains(&atom.relation.as_str()) {
                names.push(&atom.relation);
            }
        }
        names
    }
}

struct Reader {
    text: Vec<char>,
    at: usize,
}

impl Reader {
    fn blanks(&mut self) {
        while self.text.get(self.at).is_some_and(|c| c.is_whitespace()) {
            self.at += 1;
        }
    }

    fn refuse<T>(&self, wanted: &'static str) -> Result<T, PatternError> {
        let found = self.text.get(self.at).map_or_else(|| "the end".into(), |c| format!("{c:?}"));
        Err(PatternError::Syntax { place: self.at + 1, wanted, found })
    }

    fn accept(&mut self, symbol: &str) -> bool {
        self.blanks();
        let found = symbol.chars().enumerate().all(|(i, c)| self.text.get(self.at + i) == Some(&c));
        self.at += if found { symbol.len() } else { 0 };
        found
    }

    fn symbol(&mut self, symbol: &str, wanted: &'static str) -> Result<(), PatternError> {
        if self.accept(symbol) { Ok(()) } else { self.refuse(wanted) }
    }

    fn name(&mut self, wanted: &'static str) -> Result<(String, usize), PatternError> {
        self.blanks();
        let start = self.at;
        if self.text.get(start).is_none_or(|c| !c.is_alphabetic() && *c != '_') {
            return self.refuse(wanted);
        }
        while self.text.get(self.at).is_some_and(|c| c.is_alphanumeric() || *c == '_') {
            self.at += 1;
        }
        Ok((self.text[start..self.at].iter().collect(), start + 1))
    }

    fn variables(&mut self) -> Result<Vec<(String, usize)>, PatternError> {
        self.symbol("(", "\"(\"")?;
        let mut names = vec![self.name("a variable")?];
        while self.accept(",") {
            names.push(self.name("a variable")?);
        }
        self.symbol(")", "\",\" or \")\"")?;
        Ok(names)
    }

    fn end(&mut self) -> Result<(), PatternError> {
        self.blanks();
        if self.at == self.text.len() { Ok(()) } else { self.refuse("\",\" or the end") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_read() {
        let tri = Pattern::parse(" tri(a,c, b) :- e(a,b), e(a,c) ,f_2(b,c). ").unwrap();
        assert_eq!(tri.variables, ["a", "b", "c"]);
        assert_eq!(tri.columns().collect::<Vec<_>>(), ["a", "c", "b"]);
        assert_eq!(tri.relations(), ["e", "f_2"]);
        let same = Pattern::new("tri", &["a", "c", "b"], &[("e", "a", "b"), ("e", "a", "c"), ("f_2", "b", "c")]);
        let plain = |mut pattern: Pattern| {
            pattern.body.iter_mut().for_each(|atom| atom.place = 0);
            pattern
        };
        assert_eq!(plain(tri), same.unwrap());
    }

    #[test]
    fn what_is_wrong_is_told_with_its_place() {
        for (text, says) in [
            ("", "character 1: expected the name of the result, found the end"),
            ("p(a) : e(a,b)", "character 6: expected \":-\", found ':'"),
            ("p(a) :- e(a b)", "character 13: expected \",\" or \")\", found 'b'"),
            ("p(a) :- e(a,)", "character 13: expected a variable, found ')'"),
            ("p(a) :- e(a,b) e(b,a)", "character 16: expected \",\" or the end, found 'e'"),
            ("p(a) :- e(a,b,c)", "character 9: e has 3 variables"),
            ("p(a) :- e(a,1)", "character 13: expected a variable, found '1'"),
            ("p(a,z) :- e(a,b)", "character 5: no atom binds \"z\""),
            ("p(a,a) :- e(a,b)", "character 5: \"a\" is in the head already"),
            ("p(a) :- e(a,b), e(c,d)", "character 17: nothing joins e(c, d) to the rest"),
            ("p() :- e(a,b)", "character 3: expected a variable"),
        ] {
            let message = Pattern::parse(text).expect_err(text).to_string();
            assert!(message.contains(says), "{text:?} gives {message:?}");
        }
    }

    #[test]
    fn an_atom_may_join_what_comes_after_it() {
        Pattern::parse("p(a) :- e(a,b), e(c,d), e(b,c)").unwrap();
    }
}
