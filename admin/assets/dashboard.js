// Keeps a page up to date: its own address, asked for as an event stream, sends its content whenever
// that changes; the parts that are marked take their new form. Without this script a reload does.
'use strict';

const state = document.querySelector('.link-state');
let source = null;

// Puts in what is new and leaves alone what is in use.
function place(html) {
  const fresh = new DOMParser().parseFromString(html, 'text/html');
  for (const part of document.querySelectorAll('[data-live]')) {
    const next = fresh.querySelector(`[data-live="${part.dataset.live}"]`);
    if (!next || next.innerHTML === part.innerHTML) continue;
    const active = document.activeElement;
    const within = part.contains(active) ? active : null;
    if (within?.matches('input, select, textarea')) continue;
    const links = 'a, button, summary';
    const index = within ? [...part.querySelectorAll(links)].indexOf(within) : -1;
    const open = [...part.querySelectorAll('details')].map((one) => one.open);
    part.replaceChildren(...next.childNodes);
    part.querySelectorAll('details').forEach((one, at) => { one.open ||= open[at] ?? false; });
    if (index >= 0) part.querySelectorAll(links)[index]?.focus({ preventScroll: true });
  }
}

function listen() {
  if (source || !document.querySelector('[data-live]')) return;
  source = new EventSource(location.href);
  source.onopen = () => { state.hidden = true; };
  source.onmessage = (event) => place(event.data);
  source.onerror = () => { state.hidden = false; };
}

function stop() {
  source?.close();
  source = null;
}

// Nobody looks at a hidden page.
document.addEventListener('visibilitychange', () => (document.hidden ? stop() : listen()));
addEventListener('pagehide', stop);
addEventListener('pageshow', listen);

document.addEventListener('submit', (event) => {
  const question = event.target.dataset.confirm;
  if (question && !confirm(question)) event.preventDefault();
});
