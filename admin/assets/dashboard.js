// Updates the page live: its own address, requested as an event stream, sends the content whenever it
// changes; parts with data-live are replaced. Without this script, a reload does the same.
'use strict';

const state = document.querySelector('.link-state');
let source = null;
// Parts as they came, before times were made local.
const received = new WeakMap();

// Replaces changed parts, except those with a focused input.
function place(html) {
  if (drag) return;
  const fresh = new DOMParser().parseFromString(html, 'text/html');
  for (const part of document.querySelectorAll('[data-live]')) {
    const next = fresh.querySelector(`[data-live="${part.dataset.live}"]`);
    if (!next || next.innerHTML === received.get(part)) continue;
    const active = document.activeElement;
    const within = part.contains(active) ? active : null;
    if (within?.matches('input, select, textarea')) continue;
    const links = 'a, button, summary';
    const index = within ? [...part.querySelectorAll(links)].indexOf(within) : -1;
    const open = [...part.querySelectorAll('details')].map((one) => one.open);
    received.set(part, next.innerHTML);
    part.replaceChildren(...next.childNodes);
    localize(part);
    part.querySelectorAll('details').forEach((one, at) => { one.open ||= open[at] ?? false; });
    if (index >= 0) part.querySelectorAll(links)[index]?.focus({ preventScroll: true });
  }
}

// Pages have times in UTC; here they become local.
const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
const two = (number) => String(number).padStart(2, '0');
const clock = (at) => `${two(at.getHours())}:${two(at.getMinutes())}`;
const day = (at) => `${two(at.getMonth() + 1)}-${two(at.getDate())}`;

function localize(part) {
  for (const name of part.querySelectorAll('[data-zone]')) name.textContent = zone;
  for (const time of part.querySelectorAll('time[datetime]')) {
    const at = new Date(time.dateTime);
    time.title = `${at.getFullYear()}-${day(at)} ${clock(at)}:${two(at.getSeconds())}`;
    if (time.textContent.endsWith(' UTC')) time.textContent = time.title;
  }
  for (const one of part.querySelectorAll('.chart [data-at]')) {
    const at = new Date(Number(one.dataset.at));
    const text = one.firstElementChild ?? one;
    const shown = one.dataset.form === 'date' ? day(at) : clock(at);
    text.textContent = text.textContent.replace(/^\S+/, shown);
  }
}

document.querySelectorAll('[data-live]').forEach((part) => received.set(part, part.innerHTML));
localize(document);
const inputs = (form) => form.querySelectorAll('input[type=datetime-local]');
for (const input of inputs(document)) {
  if (!input.defaultValue) continue;
  const at = new Date(`${input.defaultValue}Z`);
  input.value = `${at.getFullYear()}-${day(at)}T${clock(at)}`;
}
document.addEventListener('formdata', ({ target, formData }) => {
  for (const { name, value } of inputs(target)) {
    if (value) formData.set(name, new Date(value).toISOString().slice(0, 16));
  }
});

// Dragging over a chart shows that time.
let drag = null;

// Returns the time under the pointer, and its place in the drawing.
function under(svg, event) {
  const [from, to, left, right] =
    ['from', 'to', 'left', 'right'].map((name) => Number(svg.dataset[name]));
  const box = svg.getBoundingClientRect();
  const place = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
  const x = Math.min(Math.max(place, left), right);
  return { x, at: from + (to - from) * (x - left) / (right - left) };
}

document.addEventListener('pointerdown', (event) => {
  const svg = event.target.closest('.chart svg');
  if (!svg || event.button !== 0 || event.pointerType === 'touch') return;
  event.preventDefault();
  const box = document.createElementNS(svg.namespaceURI, 'rect');
  box.setAttribute('class', 'selection');
  box.setAttribute('height', '100%');
  drag = { svg, box: svg.appendChild(box), begin: under(svg, event) };
});

document.addEventListener('pointermove', (event) => {
  if (!drag) return;
  const { x } = under(drag.svg, event);
  drag.box.setAttribute('x', Math.min(x, drag.begin.x));
  drag.box.setAttribute('width', Math.abs(x - drag.begin.x));
});

document.addEventListener('pointerup', (event) => {
  if (!drag) return;
  const { svg, box, begin } = drag;
  drag = null;
  box.remove();
  const [from, to] = [begin.at, under(svg, event).at].sort((one, other) => one - other);
  // A click selects nothing.
  if (to - from < (svg.dataset.to - svg.dataset.from) / 50) return;
  const minute = (at) => new Date(at * 60_000).toISOString().slice(0, 16);
  const query = new URLSearchParams(location.search);
  query.delete('span');
  query.set('from', minute(Math.floor(from / 60_000)));
  query.set('to', minute(Math.ceil(to / 60_000)));
  location.search = query;
});
document.addEventListener('pointercancel', () => { drag?.box.remove(); drag = null; });
document.querySelectorAll('.zoom .hint').forEach((hint) => { hint.hidden = false; });

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
