//! Joins as the oracle sees them: all rows of both sides stay, and each that comes is held against all of the other side.

use penstock_plan::{JoinHow, StepSpec};

use super::{Around, Bag, Cut, Kept, Row, Shape, bounded, int, same_key};
use crate::common::Cell;

/// When rows of a join meet, in milliseconds.
#[derive(Clone, Copy)]
enum Near {
    Whenever,
    Within(i64, i64),
    /// From the time of a left row to that in a column of it.
    Until(usize),
    Windows(Cut),
}

pub(super) struct Join<'a> {
    how: JoinHow,
    near: Near,
    on: [Vec<usize>; 2],
    shapes: [&'a Shape; 2],
    /// Columns of the right side that come out, and those of the left side that say the same as one of the right side.
    taken: Vec<usize>,
    merged: Vec<(usize, usize)>,
}

impl<'a> Join<'a> {
    pub(super) fn new(step: &StepSpec, shapes: &[&'a Shape]) -> Self {
        let StepSpec::Join { left, right, how, within, until, windowed, .. } = step else { unreachable!("a join") };
        let shapes = [shapes[0], shapes[1]];
        let near = match (within, until) {
            (Some((lower, upper)), _) => Near::Within(lower / 1_000, upper / 1_000),
            (None, Some(until)) => Near::Until(shapes[0].at(until)),
            (None, None) if *windowed => Near::Windows(shapes[0].cut.unwrap()),
            (None, None) => Near::Whenever,
        };
        let on = [shapes[0].all_at(left), shapes[1].all_at(right)];
        let columns = 0..shapes[1].schema.fields().len();
        let taken = columns.filter(|at| !same_key(left, right, &shapes, *at)).collect();
        let merged = on[0].iter().copied().zip(on[1].iter().copied());
        let merged = merged.filter(|(_, at)| same_key(left, right, &shapes, *at)).collect();
        Self { how: *how, near, on, shapes, taken, merged }
    }

    /// Whether rows of a side come out that meet none.
    fn keeps(&self, side: usize) -> bool {
        match self.how {
            JoinHow::Left | JoinHow::Anti => side == 0,
            JoinHow::Right => side == 1,
            JoinHow::Full => true,
            JoinHow::Inner | JoinHow::Semi => false,
        }
    }

    fn key<'r>(&self, side: usize, row: &'r Row) -> Vec<&'r Cell> {
        self.on[side].iter().map(|at| &row[*at]).collect()
    }

    fn time(&self, side: usize, row: &Row) -> i64 {
        int(&row[self.shapes[side].time.unwrap()])
    }

    fn bounds(&self, (start, end): (i64, i64)) -> Row {
        if matches!(self.near, Near::Windows(_)) { bounded(start, end, Vec::new()) } else { Vec::new() }
    }

    fn pair(&self, left: &Kept, right: &Kept) -> Row {
        let mut row = [self.bounds(left.window), left.row.clone()].concat();
        row.extend(self.taken.iter().map(|at| right.row[*at].clone()));
        row
    }

    fn alone(&self, side: usize, kept: &Kept) -> Row {
        let mut row = self.bounds(kept.window);
        if side == 0 {
            row.extend(kept.row.iter().cloned());
            if !self.how.is_filter() {
                row.extend(vec![Cell::Null; self.taken.len()]);
            }
            return row;
        }
        let mut left = vec![Cell::Null; self.shapes[0].schema.fields().len()];
        for (at, other) in &self.merged {
            left[*at] = kept.row[*other].clone();
        }
        row.extend(left);
        row.extend(self.taken.iter().map(|at| kept.row[*at].clone()));
        row
    }

    /// The windows of a row that are open, or one that is none; and whether, with the bounds of which window, it is late.
    fn windows(&self, side: usize, row: &Row, before: i64) -> (Vec<(i64, i64)>, Option<Row>) {
        if matches!(self.near, Near::Whenever) {
            return (vec![(0, 0)], None);
        }
        let Cell::Int(time) = row[self.shapes[side].time.unwrap()] else {
            let nulls = if matches!(self.near, Near::Windows(_)) { vec![Cell::Null; 2] } else { Vec::new() };
            return (Vec::new(), Some(nulls));
        };
        let Near::Windows(cut) = self.near else {
            return if (time as i64) < before { (Vec::new(), Some(Vec::new())) } else { (vec![(0, 0)], None) };
        };
        let all = cut.of(time as i64);
        let open: Vec<_> = all.iter().copied().filter(|(_, end)| *end > before).collect();
        let late = all.last().filter(|_| open.is_empty()).map(|(start, end)| bounded(*start, *end, Vec::new()));
        (open, late)
    }

    /// Up to before when a left row meets others: without a time until the end.
    fn until(column: usize, row: &Row) -> i64 {
        if row[column] == Cell::Null { i64::MAX } else { int(&row[column]) }
    }

    fn meet(&self, left: &Kept, right: &Kept) -> bool {
        let near = match self.near {
            Near::Whenever => true,
            Near::Within(lower, upper) => {
                (lower..=upper).contains(&(self.time(1, &right.row) - self.time(0, &left.row)))
            }
            Near::Until(column) => {
                (self.time(0, &left.row)..Self::until(column, &left.row)).contains(&self.time(1, &right.row))
            }
            Near::Windows(_) => left.window == right.window,
        };
        near && self.key(0, &left.row) == self.key(1, &right.row)
    }

    /// Whether nothing that comes can meet it.
    fn is_over(&self, side: usize, kept: &Kept, watermark: i64) -> bool {
        match (self.near, side) {
            _ if watermark == i64::MAX => true,
            (Near::Whenever, _) => false,
            (Near::Windows(_), _) => kept.window.1 <= watermark,
            (Near::Within(_, upper), 0) => self.time(0, &kept.row) + upper < watermark,
            (Near::Within(lower, _), _) => self.time(1, &kept.row) - lower < watermark,
            (Near::Until(column), 0) => Self::until(column, &kept.row) <= watermark,
            (Near::Until(_), _) => self.time(1, &kept.row) < watermark,
        }
    }

    pub(super) fn epoch(
        &self,
        sides: &mut [Vec<Kept>; 2],
        inputs: &[&Bag],
        around: Around,
        late: &mut [Bag; 2],
        out: &mut Bag,
    ) {
        for side in [0, 1] {
            for row in inputs[side] {
                let null = self.key(side, row).contains(&&Cell::Null);
                if null && !self.keeps(side) {
                    // It is left out before it can be late.
                    continue;
                }
                let (open, behind) = self.windows(side, row, around.before);
                late[side].extend(behind.map(|bounds| [bounds, row.clone()].concat()));
                for window in open {
                    let mut kept = Kept { row: row.clone(), window, met: false, told: false };
                    if null {
                        out.push(self.alone(side, &kept));
                        continue;
                    }
                    let (one, two) = sides.split_at_mut(1);
                    let others = if side == 0 { &mut two[0] } else { &mut one[0] };
                    for other in others {
                        let (left, right) = if side == 0 { (&kept, &*other) } else { (&*other, &kept) };
                        if !self.meet(left, right) {
                            continue;
                        }
                        if !self.how.is_filter() {
                            out.push(self.pair(left, right));
                        } else if self.how == JoinHow::Semi && side == 1 && !other.met {
                            out.push(self.alone(0, other));
                        }
                        (kept.met, other.met) = (true, true);
                    }
                    if self.how == JoinHow::Semi && side == 0 && kept.met {
                        out.push(self.alone(0, &kept));
                    }
                    sides[side].push(kept);
                }
            }
        }
        // Rows that are over when they come wait for a watermark, too.
        for side in [0, 1].into_iter().filter(|_| around.told) {
            for kept in sides[side].iter_mut().filter(|kept| !kept.told && self.is_over(side, kept, around.after)) {
                kept.told = true;
                if self.keeps(side) && !kept.met {
                    out.push(self.alone(side, kept));
                }
            }
        }
    }
}
