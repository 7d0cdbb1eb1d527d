//! Types as users write them, in Spark's DDL, for messages and `explain`.

use arrow_schema::{DataType, Field, TimeUnit};

/// A type in Spark's DDL; one that DDL does not write so, such as another unit of time or another layout of texts, by its name in Arrow.
#[must_use]
pub fn ddl(kind: &DataType) -> String {
    let simple = match kind {
        DataType::Boolean => "boolean",
        DataType::Int8 => "tinyint",
        DataType::Int16 => "smallint",
        DataType::Int32 => "int",
        DataType::Int64 => "bigint",
        DataType::Float32 => "float",
        DataType::Float64 => "double",
        DataType::Utf8 => "string",
        DataType::Binary => "binary",
        DataType::Date32 => "date",
        DataType::Timestamp(TimeUnit::Microsecond, None) => "timestamp_ntz",
        DataType::Timestamp(TimeUnit::Microsecond, Some(zone)) if &**zone == "UTC" => "timestamp",
        DataType::Decimal128(precision, scale) => return format!("decimal({precision},{scale})"),
        DataType::List(item) => return format!("array<{}>", ddl(item.data_type())),
        DataType::Struct(fields) => {
            let inner = |field: &std::sync::Arc<Field>| format!("{}: {}", field.name(), ddl(field.data_type()));
            return format!("struct<{}>", fields.iter().map(inner).collect::<Vec<_>>().join(", "));
        }
        DataType::Map(entries, _) => match entries.data_type() {
            DataType::Struct(pair) if pair.len() == 2 => {
                return format!("map<{}, {}>", ddl(pair[0].data_type()), ddl(pair[1].data_type()));
            }
            other => return format!("map<{other}>"),
        },
        other => return other.to_string(),
    };
    simple.to_owned()
}

/// Columns of a schema, each with its type.
pub(crate) fn columns(schema: &arrow_schema::Schema) -> String {
    let columns: Vec<String> =
        schema.fields().iter().map(|field| format!("{} {}", field.name(), ddl(field.data_type()))).collect();
    columns.join(", ")
}

/// A type beside another one, from which it differs; as Arrow names it where their DDL is the same.
pub(crate) fn told_apart(one: &DataType, other: &DataType) -> String {
    let told = ddl(one);
    if told == ddl(other) { one.to_string() } else { told }
}

/// Those of two schemas that differ; by their types in Arrow where nothing else tells them apart.
pub(crate) fn both(one: &arrow_schema::Schema, other: &arrow_schema::Schema) -> (String, String) {
    let told = (columns(one), columns(other));
    if told.0 != told.1 {
        return told;
    }
    let exact = |schema: &arrow_schema::Schema| {
        let columns = schema.fields().iter().map(|field| format!("{} {}", field.name(), field.data_type()));
        columns.collect::<Vec<_>>().join(", ")
    };
    (exact(one), exact(other))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn types_are_written_as_spark_writes_them() {
        let item = |kind| Arc::new(Field::new("item", kind, true));
        let pair = vec![Field::new("key", DataType::Utf8, false), Field::new("value", DataType::Int32, true)];
        let entries = Arc::new(Field::new("entries", DataType::Struct(pair.into()), false));
        let inner = DataType::Struct(vec![Field::new("a", DataType::Float64, true)].into());
        for (kind, text) in [
            (DataType::Int64, "bigint"),
            (DataType::Utf8, "string"),
            (DataType::LargeUtf8, "LargeUtf8"),
            (DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into())), "timestamp"),
            (
                DataType::Timestamp(TimeUnit::Microsecond, Some("Europe/Berlin".into())),
                "Timestamp(µs, \"Europe/Berlin\")",
            ),
            (DataType::Timestamp(TimeUnit::Nanosecond, None), "Timestamp(ns)"),
            (DataType::Decimal128(12, 2), "decimal(12,2)"),
            (DataType::List(item(inner)), "array<struct<a: double>>"),
            (DataType::Map(entries, false), "map<string, int>"),
        ] {
            assert_eq!(ddl(&kind), text);
        }
    }

    #[test]
    fn types_that_differ_are_told_apart() {
        let list = |nullable| DataType::List(Arc::new(Field::new("item", DataType::Int64, nullable)));
        assert_eq!(told_apart(&list(true), &DataType::Int64), "array<bigint>");
        let told = [(true, false), (false, true)].map(|(one, other)| told_apart(&list(one), &list(other)));
        assert_ne!(told[0], told[1]);
        assert!(told.iter().all(|words| words.starts_with("List(")), "{told:?}");
    }
}
