"""The worker, in the order in which a dispatch passes through it.

messages (from the broker) or dispatches (from PostgreSQL) → claim → execution and executor, which runs the
handler with its context → finishing; leases renews what runs meanwhile, session is what each thread keeps of
the database, and daemon puts them together. Nothing is imported here: a program that only declares handlers
takes the context and needs no broker.
"""
