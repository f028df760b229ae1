// The served page. Texts of the dataset are only ever set as text, never as HTML.
"use strict";

const one = (selector) => document.querySelector(selector);
const form = one("#query"), fields = form.elements, dialog = one("#sample");
const selected = new Map(JSON.parse(sessionStorage.getItem(location.pathname) ?? "[]"));  // id → tag
let about, start = 0, shown = [], asked = 0;

/** Return a new element with properties, attributes (in `set`) and children. */
function make(name, { set = {}, ...properties } = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  for (const [key, value] of Object.entries(set)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Return the server's answer. Throws with its words if it is an error. */
async function ask(place, options) {
  const reply = await fetch(place, options).catch(() => { throw new Error("The server has ended; start it again."); });
  if (reply.ok) return reply;
  throw new Error((await reply.json()).error);
}

const number = (value) => value === null ? "–" : Number(value.toPrecision(4)).toString();
const words = (kind) => kind.replaceAll("_", " ");
const taus = (tau) => Object.entries(tau).map(([side, value]) => `${side} ${number(value)}`).join(", ");

function picture(id, alt) {
  const image = make("img", { src: `picture/${id}`, alt, loading: "lazy" });
  image.addEventListener("load", () => image.classList.toggle("pixels", image.naturalWidth < 100));
  image.addEventListener("error", () => image.replaceWith(make("span", { textContent: "no picture", className: "error" })));
  return image;
}

/** Show what a function does, or why it failed. */
function said(work) {
  return async (...given) => {
    try {
      await work(...given);
    } catch (error) {
      const count = one("#count");
      count.textContent = error.message;
      count.className = "error";
    }
  };
}

function query() {
  const given = new URLSearchParams();
  for (const name of ["words", "group", "kind", "side", "low", "high", "sort"]) {
    if (fields[name].value) given.set(name, fields[name].value);
  }
  return given;
}

const search = said(async () => {
  const number = ++asked, given = query();
  const { total, has_more, samples } = await (await ask(`samples?${given}&start=${start}`)).json();
  if (number !== asked) return;  // a later search was faster
  shown = samples;
  history.replaceState(null, "", `#${given}&start=${start}`);
  one("#all").href = `found.parquet?${given}`;
  const last = Math.min(start + about.page, total), count = one("#count");
  count.textContent = `${total.toLocaleString("en")} samples${has_more ? " among the first that have the words" : ""}`;
  count.className = "";
  one("#place").textContent = total ? `${(start + 1).toLocaleString("en")} – ${last.toLocaleString("en")}` : "";
  one("#earlier").disabled = start === 0;
  one("#later").disabled = last >= total;
  one("#samples").replaceChildren(...samples.map(card));
  select();
});

/** A button with a sample's picture that opens the sample. */
function opener(id) {
  const open = make("button", { type: "button", className: "open" }, about.pictures ? picture(id, `sample ${id}`) : `${id}`);
  open.addEventListener("click", () => look(id));
  return open;
}

const texts = ({ caption, class: group }) => [make("p", {}, make("bdi", { textContent: caption })), make("small", {}, make("bdi", { textContent: group }))];

function card(sample) {
  const { id, kind, tau } = sample;
  const box = make("input", { type: "checkbox", set: { "data-id": id, "aria-label": `select sample ${id}` } });
  box.addEventListener("change", () => select([id], box.checked));
  return make("li", { className: "card" }, opener(id),
    make("label", {}, box, ` ${id}`, make("small", { textContent: ` ${words(kind)}` })),
    make("small", { textContent: `tau ${taus(tau)}` }), ...texts(sample));
}

/** Select or drop samples, and show which are selected. */
function select(ids = [], chosen = true) {
  for (const id of ids) chosen ? selected.set(id, one("#tag").value) : selected.delete(id);
  sessionStorage.setItem(location.pathname, JSON.stringify([...selected]));
  for (const box of document.querySelectorAll("#samples [type=checkbox]")) box.checked = selected.has(Number(box.dataset.id));
  one("#selected").textContent = selected.size.toLocaleString("en");
  one("#download").disabled = one("#none").disabled = selected.size === 0;
}

const download = said(async () => {
  const body = JSON.stringify({ ids: [...selected.keys()], tags: [...selected.values()] });
  const file = URL.createObjectURL(await (await ask("selection.parquet", { method: "POST", body })).blob());
  make("a", { href: file, download: "selection.parquet" }).click();
  setTimeout(() => URL.revokeObjectURL(file), 60_000);
});

const look = said(async (id) => {
  const sample = await (await ask(`sample/${id}`)).json();
  const close = make("button", { type: "button", textContent: "Close" });
  close.addEventListener("click", () => dialog.close());
  const pictures = make("div", { className: "pictures" });
  if (about.pictures) pictures.append(make("figure", {}, picture(id, `picture of sample ${id}`), make("figcaption", { textContent: "as stored" })));
  if (sample.views) pictures.append(views(id));
  const facts = [["kind", words(sample.kind)], ["class", sample.class], ...sample.captions.map((text) => ["caption", text]),
    ...Object.entries(sample.table), ...Object.entries(sample.state).map(([name, value]) => [name, number(value)])];
  dialog.replaceChildren(make("header", {}, make("h2", { id: "title", textContent: `Sample ${id}` }), close), pictures,
    make("dl", {}, ...facts.filter(([, value]) => value).flatMap(([name, value]) =>
      [make("dt", { textContent: name }), make("dd", {}, make("bdi", { textContent: value }))])),
    ...past(sample.history), around(id));
  if (!dialog.open) dialog.showModal();
  close.focus();
  dialog.scrollTop = 0;
});

/** The neighbours of a sample, which come later: it is compared with all others. */
function around(id) {
  const place = make("section", { id: "around" });
  const say = (textContent, className = "") => place.replaceChildren(make("p", { textContent, className, set: { role: "status" } }));
  if (!about.neighbours) {
    say("To see neighbours and hardest negatives, start again with --serve --neighbours 12; it encodes all samples once.");
    return place;
  }
  say("comparing with all samples…");
  ask(`neighbours/${id}`).then((reply) => reply.json()).then(({ lists }) =>
    place.replaceChildren(...lists.flatMap(({ title, words, samples }) => [
      make("h3", { textContent: title }), ...words ? [make("p", { textContent: words })] : [],
      make("ol", { className: "cards" }, ...samples.map(neighbour))]))
  ).catch((error) => say(error.message, "error"));
  return place;
}

function neighbour(sample) {
  return make("li", { className: "card" }, opener(sample.id), `${sample.id}`, make("small", { textContent: sample.figures }), ...texts(sample));
}

/** Two augmented views, which a button draws again for the next epoch. */
function views(id) {
  let epoch = 0;
  const image = make("img", { src: `views/${id}?epoch=0`, alt: "two augmented views" });
  const caption = make("figcaption", { textContent: "two views, epoch 0 " });
  const again = make("button", { type: "button", textContent: "Next epoch" });
  again.addEventListener("click", () => {
    image.src = `views/${id}?epoch=${++epoch}`;
    caption.firstChild.textContent = `two views, epoch ${epoch} `;
  });
  caption.append(again);
  return make("figure", {}, image, caption);
}

/** A line of tau over the snapshots for each side, under its range. */
function past(history) {
  const values = history.flatMap(({ tau }) => Object.values(tau)).filter((value) => value !== null);
  if (history.length < 2 || !values.length) return [];
  const [low, high] = [Math.min(...values), Math.max(...values)], steps = history.map(({ step }) => step);
  const across = (step) => 100 * (step - steps[0]) / (steps.at(-1) - steps[0] || 1);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 40");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  const told = `tau from ${history[0].tag} to ${history.at(-1).tag}, between ${number(low)} and ${number(high)}`;
  svg.setAttribute("aria-label", told);
  about.sides.forEach((side, place) => {
    const line = document.createElementNS(svg.namespaceURI, "polyline");
    const points = history.filter(({ tau }) => tau[side] !== null)
      .map(({ step, tau }) => `${across(step)},${38 - 36 * (tau[side] - low) / (high - low || 1)}`);
    line.setAttribute("points", points.join(" "));
    if (place) line.setAttribute("class", "second");
    svg.append(line);
  });
  return [make("figure", {}, svg, make("figcaption", { textContent: `${told}${about.sides.length > 1 ? `; blue ${about.sides[0]}, orange ${about.sides[1]}` : ""}` }))];
}

const begin = said(async () => {
  about = await (await ask("about")).json();
  one("#run").textContent = document.title = about.run;
  one("#facts").textContent = `${about.samples.toLocaleString("en")} samples at ${about.snapshot}`;
  one("#notes").replaceChildren(...about.notes.map((note) => make("li", { textContent: note })));
  one("#classes").replaceChildren(...about.classes.map((value) => make("option", { value })));
  const kinds = Object.entries(about.kinds).map(([value, count]) => make("option", { value, textContent: `${words(value)} (${count.toLocaleString("en")})` }));
  fields.kind.replaceChildren(make("option", { value: "", textContent: "all" }), ...kinds);
  fields.side.replaceChildren(...about.sides.map((value) => make("option", { value, textContent: value })));
  fields.side.closest("label").hidden = about.sides.length < 2;
  if (!about.ranked) fields.sort.querySelector("[value=misfits]").remove();
  const past = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of past) if (fields[name]) fields[name].value = value;
  start = Number(past.get("start")) || 0;
  await search();
});

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (fields.id.value) return void look(fields.id.value);
  start = 0;
  search();
});
form.addEventListener("reset", () => setTimeout(() => { start = 0; search(); }));
one("#earlier").addEventListener("click", () => { start = Math.max(0, start - about.page); search(); });
one("#later").addEventListener("click", () => { start += about.page; search(); });
one("#whole").addEventListener("click", () => select(shown.map(({ id }) => id)));
one("#none").addEventListener("click", () => select([...selected.keys()], false));
one("#download").addEventListener("click", download);
begin();
