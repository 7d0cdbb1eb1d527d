//! Layouts as they travel, and what a plan tells of its operators.

use penstock_engine::{Layout, LayoutError, Operator, Plan, Range};

fn read(text: &str) -> Result<Layout, serde_json::Error> {
    serde_json::from_value(text.into())
}

/// Halves of halves, some further than others.
fn ragged(deepest: u8) -> Vec<Range> {
    let mut ranges = vec![Range::ALL];
    for at in 0..deepest {
        let longest = ranges.iter().position(|range| range.length() == at).expect("one is as long");
        ranges.splice(longest..=longest, ranges[longest].split().expect("not the shortest"));
    }
    ranges
}

#[test]
fn a_layout_is_what_it_was() {
    for ranges in [ragged(0), ragged(3), ragged(20), Layout::even(6, 1).ranges().iter().map(|(one, _)| *one).collect()]
    {
        for workers in [1, 3, 300] {
            let layout = Layout::dealt(ranges.clone(), workers).unwrap();
            let text = serde_json::to_string(&layout).unwrap();
            assert_eq!(serde_json::from_str::<Layout>(&text).unwrap(), layout, "{text}");
        }
    }
    let layout = Layout::dealt(ragged(2), 2).unwrap();
    assert_eq!(serde_json::to_string(&layout).unwrap(), r#""2:0,1;1:0""#);
}

#[test]
fn what_is_no_layout_is_refused() {
    for text in
        ["", "1", "1:", "1:0", "1:0,0,0", "1:0,x", "21:0", "-1:0", "1:0;0:0", "2:0;1:0,0", "1:0,99999999999", "0:0;"]
    {
        assert!(read(text).is_err(), "{text}");
    }
    assert!(matches!(Layout::try_from("1:0".to_owned()), Err(LayoutError::Gap)));
    assert!(matches!(Layout::try_from("1:0,a".to_owned()), Err(LayoutError::Text)));
    assert_eq!(
        read("0:7").unwrap(),
        Layout::dealt(vec![Range::ALL], 1)
            .map(|mut one| {
                one.give(Range::ALL, 7).unwrap();
                one
            })
            .unwrap()
    );
}

/// A top over windows did not say of which its state is.
#[test]
fn what_was_written_before_windows_were_told_goes_on() {
    let plan = |types: &str| {
        let (types, columns) = (types.to_owned(), String::new());
        let operator = Operator { name: "top".into(), kind: "top".into(), types, version: 1, columns, reads: None };
        Plan { operators: vec![operator], sources: vec!["rows".into()] }
    };
    let goes_on = |before: &str, now: &str| plan(before).check(&plan(now)).is_ok();
    assert!(
        goes_on("long -> rows", "long -> rows; windows of 10 s every 10 s")
            && goes_on("a; windows in ms", "a; windows in ms")
    );
    assert!(!goes_on("long -> rows; windows of 10 s every 10 s", "long -> rows; windows of 20 s every 10 s"));
    assert!(
        !goes_on("long -> rows; windows of 10 s every 10 s", "long -> rows") && !goes_on("long -> row", "long -> rows")
    );
}
