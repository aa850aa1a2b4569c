// A worker in Node, over both deliveries: it takes messages where FLOWFORGE_AMQP_URL names a RabbitMQ, and else dispatches
// from PostgreSQL (claim_next). Handlers are functions (task, signal) by their names; task has input, upstream, item and
// attempt. With a login that is a member of flowforge_worker:
//
//     npm ci && PGHOST=… PGUSER=… PGDATABASE=… FLOWFORGE_QUEUES=default node worker.mjs ./handlers.mjs
//
// What any worker has to do is in docs/worker-protocol.md.
import { randomUUID } from "node:crypto";
import { EventEmitter, once } from "node:events";
import { hostname } from "node:os";
import { resolve } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import amqp from "amqplib";
import pg from "pg";

const { FLOWFORGE_AMQP_URL: broker, FLOWFORGE_NAMESPACE: namespace, FLOWFORGE_QUEUES: queue = "default" } = process.env;
const { default: handlers } = await import(resolve(process.argv[2]));
const [worker, lease, slots] = [`${hostname()}:${process.pid}`, "30 s", 4];
const pool = new pg.Pool({ max: slots + 2, keepAlive: true, connectionTimeoutMillis: 10_000, query_timeout: 60_000 });
const tell = (error) => console.error(String(error)); // the loss of a connection ends nothing
const events = new EventEmitter(); // free: a slot is; wake: there may be work
const [tasks, stops] = [new Set(), new Set()]; // under way: promises, and what stops the handlers
let [stopping, claiming] = [false, Promise.resolve()];
pool.on("error", tell);

// One statement, repeated until it is answered: every call here is safe to repeat as it is. What is refused for its values
// (22…, WF…) is refused for good.
async function ask(text, ...values) {
  for (let pause = 100; ; pause = Math.min(2 * pause, 5000)) {
    try {
      return (await pool.query(text, values)).rows;
    } catch (error) {
      if (/^(22|WF)/.test(error.code)) throw error;
      tell(error);
      await sleep(pause);
    }
  }
}

async function run({ task_run_id: id, fencing_token: token, ...task }) {
  const giveBack = (reason) => ask("select flowforge.release_task_run($1, $2, $3)", id, token, reason);
  const finish = (outcome, output, error, retryable = true) =>
    ask("select flowforge.finish_task_run($1, $2, $3, $4, $5, $6)", id, token, outcome, output, error, retryable);
  if (!Object.hasOwn(handlers, task.handler)) return giveBack("unknown_handler");
  if (stopping) return giveBack("unstarted");
  const [stop, ended] = [new AbortController(), new AbortController()];
  const after = (ms) => sleep(ms, undefined, { signal: ended.signal });
  const renew = async () => {
    await after(task.lease * 333);
    const [{ outcome }] = await ask(
      "select outcome from flowforge.renew_leases(array[$1::int8], array[$2::int8], $3)", id, token, lease);
    if (outcome === "lost" || outcome === "cancel") stop.abort(outcome);
    else return renew();
  };
  renew().catch(() => {});
  const limit = (task.time_limit ?? Infinity) * 1000;
  if (limit < 2 ** 31) after(limit).then(() => stop.abort("time limit exceeded"), () => {}); // longer: the scheduler's
  stops.add(stop);
  let output, failure;
  try {
    output = await Promise.race([handlers[task.handler](task, stop.signal), once(stop.signal, "abort")]);
  } catch (error) {
    failure = String(error).replaceAll("\0", "\ufffd");
  }
  stops.delete(stop);
  ended.abort();
  const why = stop.signal.reason;
  if (why === "lost") return; // it is somebody else's: report nothing
  if (why === "shutdown") return giveBack(why);
  if (why === "cancel") return finish("cancelled", null, "stopped");
  if (why || failure !== undefined) return finish("failed", null, why ?? failure);
  try {
    await finish("succeeded", JSON.stringify(output) ?? "null", null);
  } catch (error) { // not JSON, or nothing that PostgreSQL keeps; another attempt would bring the same
    await finish("failed", null, `output not storable: ${error.message}`, false);
  }
}

// A claim under an id of its own, the same until the claim is answered; how many it won.
async function claim(call, ...values) {
  const rows = await ask(`select task_run_id, fencing_token, handler, attempt, input, upstream_outputs as upstream, item,
      extract(epoch from lease)::float8 as lease, extract(epoch from time_limit)::float8 as time_limit
    from flowforge.${call} where outcome = 'claimed'`, worker, randomUUID(), lease, ...values);
  for (const row of rows) {
    const task = run(row).catch(tell).finally(() => { tasks.delete(task); events.emit("free"); });
    tasks.add(task);
  }
  return rows.length;
}

const free = async () => { while (tasks.size >= slots && !stopping) await once(events, "free"); };

// A message is acknowledged when its claim has been answered, won or lost; what no claim accepts goes to the dead letters.
async function consume(channel) {
  await free();
  if (stopping) return;
  await channel.consume(`${namespace ? `${namespace}.` : ""}flowforge.${queue}`, async (message) => {
    if (message === null || stopping) return channel.close().catch(tell); // null: the queue was deleted
    let settle = () => channel.ack(message);
    try {
      const { task_run_id, dispatch_id } = JSON.parse(message.content);
      await (claiming = claim("claim_task_run($4, $5, $1, $2, $3)", task_run_id, dispatch_id));
    } catch (error) {
      tell(error);
      settle = () => channel.nack(message, false, false);
    }
    try {
      if (tasks.size >= slots) await channel.cancel(worker).then(() => { consume(channel).catch(tell); });
      settle();
    } catch (error) { tell(error); } // its connection is gone: the broker offers the message again
  }, { consumerTag: worker });
}

async function takeMessages() {
  while (!stopping) {
    try {
      const connection = (await amqp.connect(broker, { timeout: 10_000 })).on("error", tell);
      try {
        const channel = (await connection.createChannel()).on("error", tell);
        const closed = new Promise((done) => { channel.on("close", done); });
        await channel.prefetch(1);
        await consume(channel);
        await closed;
      } finally { await connection.close(); }
    } catch (error) { tell(error); }
    await sleep(1000);
  }
}

async function takeDispatches() {
  listen();
  while (!stopping) {
    await free();
    if (stopping) return;
    const won = await (claiming = claim("claim_next(array[$4], $1, $2, $3, $5)", queue, slots - tasks.size));
    if (won === 0) await once(events, "wake", { signal: AbortSignal.timeout(1000) }).catch(() => {});
  }
}

async function listen() {
  while (!stopping) {
    const client = new pg.Client({ keepAlive: true, connectionTimeoutMillis: 10_000 }).on("error", tell);
    client.on("notification", () => events.emit("wake"));
    const ended = new Promise((done) => { client.on("end", done); });
    await client.connect().then(() => client.query("listen flowforge_outbox")).then(() => ended).catch(tell);
    await client.end().catch(() => {});
    await sleep(1000);
  }
}

async function stopAll() { // take nothing new, give back what runs
  if (stopping) process.exit(130);
  stopping = true;
  setTimeout(() => process.exit(1), 30_000); // whatever keeps the answers away
  events.emit("free");
  await claiming.catch(() => {});
  for (const each of stops) each.abort("shutdown");
  while (tasks.size > 0) await Promise.allSettled(tasks);
  process.exit(0);
}

process.on("SIGTERM", stopAll).on("SIGINT", stopAll);
await (broker ? takeMessages() : takeDispatches());
