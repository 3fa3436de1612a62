"""One file per stream, or per list of streams; `highwater infer TOPIC` writes one."""
