"""The tags of runs: Dagster's own, and those of Highwater with their values."""

# The tag by which runs and assets of one stream are found.
STREAM_TAG = "highwater/stream"
# Runs that dagster.yaml bounds for each stream, by its name: those of slices of tiers, and those of slices of the main
# topic, so that a long backlog leaves a place for retries and publication.
TIER_TAG = "highwater/tier"
MAIN_TAG = "highwater/main"
RANGE_START = "dagster/asset_partition_range_start"
RANGE_END = "dagster/asset_partition_range_end"
PARTITION = "dagster/partition"
RUN_NUMBER = "highwater/run_number"
PURPOSE = "highwater/purpose"
PRIORITY = "dagster/priority"
# Runs of slices have the negative of their place (`highwater.orchestration.sensing.run_places`). Audits come last.
AUDIT_PRIORITY = "-1000000001"
# Runs for records that retention is about to take start before all others.
URGENT_PRIORITY = "1"
RETRY = "retry"
PROBE = "probe"
PUBLISH = "publish"
