"""Real PostgreSQL and RabbitMQ for the tests, started privately, gone with the process that started them."""
