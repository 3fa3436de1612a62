"""The stages that write a stream's tables, one module per table, with the Spark expressions that they share."""
