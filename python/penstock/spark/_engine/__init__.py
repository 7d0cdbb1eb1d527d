"""The engine of resident workers behind `penstock.spark.engine`: members, generations, epochs, moves, figures."""
