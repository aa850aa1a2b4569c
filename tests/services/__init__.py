"""Real servers for the tests: PostgreSQL and RabbitMQ, started privately and gone with the process that started them."""
