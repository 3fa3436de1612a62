"""Clients of Kafka, Spark, the lake, the ledger and the schema registry; importing them connects to nothing (I14)."""
