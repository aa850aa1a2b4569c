"""RabbitMQ, and the only module that imports pika.

PublishChannel publishes batches with pipelined confirms and judges each message, and each queue, by itself.
ConsumeChannel delivers messages and takes acknowledgements. Each owns one connection in a thread of its own,
which always serves heartbeats and reconnects by itself, through its URLs in turn, with jittered back-off.
Only the publishing side declares, so that it alone learns that a queue was gone:

    exchange NS.flowforge        direct, durable
    queue    NS.flowforge.<q>    durable, x-queue-type, bound by the key <q>; its dead letters go to the
                                 exchange NS.flowforge.dead
    exchange NS.flowforge.dead   fanout, durable, with a durable queue of the same name

Nothing here decides anything: the database does. What is lost or doubled here is found and recognised there.
"""

from flowforge.broker.connection import DEAD, Names, unusable
from flowforge.broker.consume import ConsumeChannel, Delivery
from flowforge.broker.publish import Message, Outcome, PublishChannel

__all__ = ["DEAD", "ConsumeChannel", "Delivery", "Message", "Names", "Outcome", "PublishChannel", "unusable"]
