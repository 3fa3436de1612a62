"""What is connected to: Kafka, Spark, the lake, the ledger.

What belongs here: clients and their configuration. Heavy libraries are imported where they are used, so that
loading connects to nothing (I14). What does not: deciding what to read or write.
"""
