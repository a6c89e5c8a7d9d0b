// Updates the page live: its own address, requested as an event stream, sends the content whenever it
// changes; parts with data-live are replaced. Without this script, a reload does the same.
'use strict';

const state = document.querySelector('.link-state');
let source = null;

// Replaces changed parts, except those with a focused input.
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

// Hidden pages are not updated.
document.addEventListener('visibilitychange', () => (document.hidden ? stop() : listen()));
addEventListener('pagehide', stop);
addEventListener('pageshow', listen);

document.addEventListener('submit', (event) => {
  const question = event.target.dataset.confirm;
  if (question && !confirm(question)) event.preventDefault();
});
