"""FlowForge: a durable workflow engine whose correctness lives in PostgreSQL."""
