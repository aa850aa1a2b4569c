// What `flowforge conformance` asks of a worker, in Node: see docs/worker-protocol.md.
import { appendFile } from "node:fs/promises";
import { setTimeout as sleep } from "node:timers/promises";

export default {
  "conformance.echo": ({ input, upstream, item }) => ({ input, upstream, item }),
  "conformance.fail": ({ input }) => { throw new Error(input.error); },
  "conformance.unstorable": () => "\0",
  "conformance.nested": () => Array.from({ length: 100_000 }).reduce((value) => [value], []),
  "conformance.tick": async ({ input: { file, ticks } }, signal) => {
    await appendFile(file, "b");
    for (let tick = 0; tick < ticks; tick++) {
      await sleep(100, undefined, { signal });
      await appendFile(file, ".");
    }
    await appendFile(file, "e");
  },
};
