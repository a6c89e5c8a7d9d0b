// BullMQ: `addBulk` of a thousand, and one worker with a concurrency. Arguments: submit|work URL JOBS.
const { Queue, Worker } = require(`${process.env.PEER_NODE_MODULES}/bullmq`);

const [what, url, jobs] = process.argv.slice(2);
const { hostname: host, port } = new URL(url);
const connection = { host, port: Number(port), maxRetriesPerRequest: null };
const BULK = 1000;

async function submit() {
  const queue = new Queue('peer', { connection });
  await queue.waitUntilReady();
  const all = Array.from({ length: Number(jobs) }, (_, i) => ({
    name: 'job',
    data: { prompt: `Invoice ${i} was paid on the ${1 + (i % 28)} of March`, max_tokens: 16 },
  }));
  const started = process.hrtime.bigint();
  const bulks = [];
  for (let at = 0; at < all.length; at += BULK) bulks.push(queue.addBulk(all.slice(at, at + BULK)));
  await Promise.all(bulks);
  console.log(JSON.stringify({ seconds: Number(process.hrtime.bigint() - started) / 1e9 }));
  await queue.close();
}

function work() {
  new Worker('peer', async () => 'an answer of a few words', { connection, concurrency: 200 });
}

if (what === 'submit') submit(); else work();
