// Shows the answer of the playground while it is generated. Without this script, the form loads a page with the answer.
const form = document.querySelector('form[data-stream]');
const stop = form.querySelector('[data-stop]');
const [answer, problem, usage] = ['answer', 'problem', 'usage'].map((id) => document.getElementById(id));
let running = null;

// Yields the data of a response's events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const lines = text.split('\n');
    text = lines.pop();
    for (const line of lines) if (line.startsWith('data: ')) yield line.slice(6);
  }
}

async function ask(signal) {
  const started = performance.now();
  const headers = { Accept: 'text/event-stream' };
  const body = new URLSearchParams(new FormData(form));
  const response = await fetch(form.action, { method: 'POST', headers, body, signal });
  if (!response.ok) throw new Error((await response.json()).error.message);
  if (response.headers.get('Content-Type').startsWith('application/json')) {
    // A vector comes at once.
    const { data: [{ embedding }], usage: { prompt_tokens: prompt } } = await response.json();
    answer.append(`${embedding.length} dimensions\n[${embedding.join(', ')}]`);
    usage.textContent = `${prompt} prompt tokens`;
    return;
  }
  for await (const data of events(response)) {
    if (data === '[DONE]') return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    answer.append(chunk.choices[0]?.delta?.content ?? '');
    if (chunk.usage) {
      const seconds = ((performance.now() - started) / 1000).toFixed(1);
      const { prompt_tokens: prompt, completion_tokens: generated } = chunk.usage;
      usage.textContent = `${prompt} prompt tokens, ${generated} generated, ${seconds} s`;
    }
  }
}

form.addEventListener('submit', async (event) => {
  event.preventDefault();
  running?.abort();
  const own = new AbortController();
  running = own;
  answer.replaceChildren();
  [answer.hidden, problem.hidden, stop.hidden] = [false, true, false];
  usage.textContent = 'Running…';
  try {
    await ask(own.signal);
  } catch (error) {
    const isStopped = own.signal.aborted;
    usage.textContent = isStopped ? 'Stopped.' : '';
    problem.textContent = isStopped ? '' : error.message;
    problem.hidden = isStopped;
  }
  if (running === own) stop.hidden = true;
});

stop.addEventListener('click', () => running?.abort());
addEventListener('pagehide', () => running?.abort());
