// A worker in Node: it takes messages where FLOWFORGE_AMQP_URL names a RabbitMQ, and else dispatches from PostgreSQL.
// Handlers are functions (task, signal) by their names. With a login that is a member of flowforge_worker:
//
//     npm ci && PGHOST=… PGUSER=… PGDATABASE=… FLOWFORGE_QUEUES=node node worker.mjs ./handlers.mjs
//
// A queue that no other kind of worker serves: the tasks' "queue".
// What any worker must do is in docs/worker-protocol.md. A busy one would keep its consumer while it has room, and LISTEN.
import { randomUUID } from "node:crypto";
import { once } from "node:events";
import { hostname } from "node:os";
import { resolve } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import amqp from "amqplib";
import pg from "pg";

const { FLOWFORGE_AMQP_URL: broker, FLOWFORGE_NAMESPACE: namespace, FLOWFORGE_QUEUES: queue = "default" } = process.env;
if (process.argv.length < 3) { console.error("usage: node worker.mjs HANDLERS, a module of functions"); process.exit(2); }
const { default: handlers } = await import(resolve(process.argv[2]));
const [worker, lease, slots] = [`${hostname()}:${process.pid}`, "30 s", 4];
const tell = (error) => console.error(String(error)); // the loss of a connection ends nothing
const pool = new pg.Pool({ max: 2 * slots, keepAlive: true, connectionTimeoutMillis: 10_000, query_timeout: 60_000 });
pool.on("error", tell);
const stopping = new AbortController();
let [channel, noMessage, turn] = [null, () => {}, Promise.resolve()];

async function ask(text, ...values) { // until it is answered, or refused for its values: each call is safe to repeat
  for (;; await sleep(500)) {
    const answer = await pool.query(text, values).catch((error) => error);
    if (answer.rows) return answer.rows;
    if (/^(22|23|54|WF)/.test(answer.code)) throw answer;
    tell(answer);
  }
}

async function run({ task_run_id: id, fencing_token: token, ...task }) {
  const giveBack = (reason) => ask("select flowforge.release_task_run($1, $2, $3)", id, token, reason);
  const finish = (outcome, output, error, retryable = true) =>
    ask("select flowforge.finish_task_run($1, $2, $3, $4, $5, $6)", id, token, outcome, output, error, retryable);
  if (!Object.hasOwn(handlers, task.handler)) return giveBack("unknown_handler");
  if (stopping.signal.aborted) return giveBack("unstarted");
  const stop = new AbortController(); // of the handler, and of what goes on beside it
  const after = (seconds) => sleep(1000 * seconds, undefined, { signal: stop.signal });
  const renew = async () => {
    await after(task.lease / 3);
    const [{ outcome }] = await ask(
      "select outcome from flowforge.renew_leases(array[$1::int8], array[$2::int8], $3)", id, token, lease);
    return outcome === "lost" || outcome === "cancel" ? stop.abort(outcome) : renew();
  };
  renew().catch(() => {});
  if (task.limit < 2e6) after(task.limit).then(() => stop.abort("time limit exceeded"), () => {}); // else the scheduler's
  stopping.signal.addEventListener("abort", () => stop.abort("shutdown"), { signal: stop.signal });
  let result, retryable = true;
  try {
    const output = await Promise.race([handlers[task.handler](task, stop.signal), once(stop.signal, "abort")]);
    retryable = false; // should it be no JSON
    result = ["succeeded", JSON.stringify(output) ?? "null", null];
  } catch (error) {
    result = ["failed", null, String(error).replaceAll("\0", "\ufffd"), retryable];
  }
  const why = stop.signal.reason;
  stop.abort("over");
  if (why === "lost") return; // it is somebody else's: report nothing
  if (why === "shutdown") return giveBack(why);
  if (why) result = why === "cancel" ? ["cancelled", null, "stopped"] : ["failed", null, why];
  await finish(...result).catch(({ message }) => finish("failed", null, `output not storable: ${message}`, false));
}

// A claim under an id of its own, repeated with that id until it is answered; what it won, if anything.
const claim = async (call, ...values) => (await ask(`select task_run_id, fencing_token, handler, attempt, input, item,
    upstream_outputs as upstream, extract(epoch from lease)::float8 as lease,
    coalesce(extract(epoch from time_limit)::float8, 'infinity') as limit
  from flowforge.${call} where outcome = 'claimed'`, worker, randomUUID(), lease, ...values))[0];

const takeDispatch = async () => await claim("claim_next(array[$4], $1, $2, $3, 1)", queue) ?? sleep(200);

async function openChannel() {
  const connection = (await amqp.connect(broker, { timeout: 10_000 })).on("error", tell);
  const opened = await connection.createChannel().catch(async (error) => { await connection.close(); throw error; });
  channel = opened.on("error", tell);
  channel.on("close", () => { channel = null; noMessage(); connection.close().catch(() => {}); });
  await channel.prefetch(1);
}

async function takeMessage() { // by a consumer of its own, which is gone before another message can come
  if (channel === null) await openChannel();
  const from = channel;
  const message = await new Promise((found, refused) => {
    noMessage = () => found(null);
    if (stopping.signal.aborted) return noMessage();
    from.consume(`${namespace ? `${namespace}.` : ""}flowforge.${queue}`, found).catch(refused);
  });
  if (message === null) return;
  from.cancel(message.fields.consumerTag).catch(tell);
  const claimed = claim("claim_task_run(($4::jsonb->>'task_run_id')::int8, ($4::jsonb->>'dispatch_id')::uuid, $1, $2, $3)",
    String(message.content));
  // Not before: acknowledged, won or lost; to the dead letters, when unreadable. The connection may be gone: it comes again.
  await claimed.then(() => from.ack(message), () => from.nack(message, false, false)).catch(tell);
  return claimed;
}

async function loop() {
  const take = () => stopping.signal.aborted ? undefined : broker ? takeMessage() : takeDispatch();
  while (!stopping.signal.aborted) {
    try {
      const task = await (turn = turn.then(take, take)); // one loop takes at a time
      if (task) await run(task);
    } catch (error) { tell(error); await sleep(1000); }
  }
}

function stopAll() { // take nothing new, give back what runs; when asked again, end at once
  if (stopping.signal.aborted) process.exit(130);
  setTimeout(() => process.exit(1), 30_000); // whatever keeps the answers away
  stopping.abort();
  noMessage();
}

process.on("SIGTERM", stopAll).on("SIGINT", stopAll);
await Promise.all(Array.from({ length: slots }, loop));
process.exit(0);
