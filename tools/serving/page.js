// The served page. Texts of the dataset are only ever set as text, never as HTML.
"use strict";

const one = (selector) => document.querySelector(selector);
const form = one("#query"), fields = form.elements, dialog = one("#sample");
const selected = new Map(JSON.parse(sessionStorage.getItem(location.pathname) ?? "[]"));  // id → tag
const STEPS = { ArrowLeft: -1, k: -1, ArrowRight: 1, j: 1 };
let about, start = 0, total = 0, shown = [], asked = 0;
let open, last = -1, stepping = null, compared = Promise.resolve();  // last: where among those found the reader was

/** Return a new element of HTML or SVG with properties, attributes (in `set`) and children. */
function make(name, { set = {}, ...properties } = {}, ...children) {
  const kind = ["svg", "polyline"].includes(name) ? "2000/svg" : "1999/xhtml";
  const element = Object.assign(document.createElementNS(`http://www.w3.org/${kind}`, name), properties);
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
const sides = (values) => Object.entries(values).map(([side, value]) => `${side} ${number(value)}`).join(", ");
const marginIs = () => `cosine of the pair minus that of the hardest of ${about.negatives.toLocaleString("en")} random negatives`;

function picture(id, alt) {
  const onload = ({ target }) => target.classList.toggle("pixels", target.naturalWidth < 100);
  const onerror = ({ target }) => target.replaceWith(make("span", { textContent: "no picture", className: "error" }));
  return make("img", { alt, onload, onerror, src: `picture/${id}`, loading: "lazy" });
}

/** Show what a function does, or why it failed. */
function reportingErrors(work) {
  return async (...given) => {
    try {
      await work(...given);
    } catch (error) {
      say(dialog.open ? "#place-found" : "#count", error.message, "error");
    }
  };
}

const say = (selector, textContent, className = "") => Object.assign(one(selector), { textContent, className });

function query() {
  const given = new URLSearchParams();
  for (const name of ["words", "group", "kind", "side", "low", "high", "sort"]) {
    if (fields[name].value) given.set(name, fields[name].value);
  }
  return given;
}

const search = reportingErrors(async () => {
  const number = ++asked, given = query();
  const found = await (await ask(`samples?${given}&start=${start}`)).json();
  if (number !== asked) return;  // a later search was faster
  ({ total, samples: shown } = found);
  last = -1;
  history.replaceState(null, "", `#${given}&start=${start}`);
  one("#all").href = `found.parquet?${given}`;
  const end = Math.min(start + about.page, total);
  say("#count", `${total.toLocaleString("en")} samples${found.has_more ? " among the first that have the words" : ""}`);
  one("#place").textContent = total ? `${(start + 1).toLocaleString("en")} – ${end.toLocaleString("en")}` : "";
  one("#earlier").disabled = start === 0;
  one("#later").disabled = end >= total;
  one("#samples").replaceChildren(...shown.map(card));
  select();
});

/** A button with a sample's picture that opens the sample. */
const opener = (id) => make("button", { type: "button", className: "open", onclick: () => look(id) },
  about.pictures ? picture(id, `sample ${id}`) : `${id}`);

const texts = ({ caption, class: group }) => [make("p", {}, make("bdi", { textContent: caption })), make("small", {}, make("bdi", { textContent: group }))];

function card(sample) {
  const { id, kind, tau, log_s, margin } = sample;
  const figures = [["tau", sides(tau)], ["log s", sides(log_s), "above 0, the negatives outweigh the positive pair"],
    ...margin === null ? [] : [["margin", number(margin), marginIs()]]];
  const box = make("input", { type: "checkbox", onchange: () => select([id], box.checked), set: { "data-id": id, "aria-label": `select sample ${id}` } });
  return make("li", { className: "card" }, opener(id),
    make("label", {}, box, ` ${id}`, make("small", { textContent: ` ${words(kind)}` })),
    ...figures.map(([name, value, title = ""]) => make("small", { textContent: `${name} ${value}`, title })), ...texts(sample));
}

/** Select or drop samples, and show which are selected. */
function select(ids = [], chosen = true) {
  for (const id of ids) chosen ? selected.set(id, one("#tag").value) : selected.delete(id);
  sessionStorage.setItem(location.pathname, JSON.stringify([...selected]));
  for (const box of document.querySelectorAll("#samples [type=checkbox]")) box.checked = selected.has(Number(box.dataset.id));
  one("#selected").textContent = selected.size.toLocaleString("en");
  one("#download").disabled = one("#none").disabled = selected.size === 0;
}

const download = reportingErrors(async () => {
  const body = JSON.stringify({ ids: [...selected.keys()], tags: [...selected.values()] });
  const file = URL.createObjectURL(await (await ask("selection.parquet", { method: "POST", body })).blob());
  make("a", { href: file, download: "selection.parquet" }).click();
  setTimeout(() => URL.revokeObjectURL(file), 60_000);
});

const placeOf = (sample) => shown.findIndex(({ id }) => id === sample);

const look = reportingErrors(async (id) => {
  const sample = await (await ask(`sample/${id}`)).json();
  const pictures = make("div", { className: "pictures" });
  if (about.pictures) pictures.append(make("figure", {}, picture(id, `picture of sample ${id}`), make("figcaption", {}, "as stored", ...texts(sample))));
  if (sample.views) pictures.append(views(id));
  const facts = [["kind", words(sample.kind)], ["class", sample.class], ...sample.captions.map((text) => ["caption", text]),
    ...Object.entries(sample.table), ["margin", sample.margin !== null && `${number(sample.margin)}, the ${marginIs()}`],
    ...Object.entries(sample.state).map(([name, value]) => [name, number(value)])];
  one("#title").textContent = `Sample ${id}`;
  one("#content").replaceChildren(pictures, around(id),
    make("dl", {}, ...facts.filter(([, value]) => value).flatMap(([name, value]) =>
      [make("dt", { textContent: name }), make("dd", {}, make("bdi", { textContent: value }))])),
    ...past(sample.history));
  const here = placeOf(open = sample.id);
  if (here >= 0) last = here;
  say("#place-found", `${here < 0 ? "Not on this page" : (start + here + 1).toLocaleString("en")} of ${total.toLocaleString("en")} found; keys ← → or k j`);
  if (!dialog.open) dialog.showModal();
  if (!document.activeElement.closest("dialog header")) one("#close").focus();
  dialog.scrollTop = 0;
});

/** Open the sample found before (by -1) or after (1) this one; from a neighbour: the one that led there, or the next. */
const step = reportingErrors(async (by) => {
  const here = placeOf(open), next = start + (here < 0 ? last + (by > 0) : here + by);
  if (next < 0 || next >= total) return say("#place-found", `This is the ${by > 0 ? "last" : "first"} sample found.`);
  if (!shown[next - start]) {
    start = by > 0 ? next : Math.max(0, start - about.page);
    await search();
  }
  await look(shown[next - start].id);
});

/** Step, unless a step is being made: a key may be held down. */
const go = (by) => stepping ??= step(by).finally(() => stepping = null);

/** The neighbours of a sample, in places kept for them: they come later, since it is compared with all others. */
function around(id) {
  if (!about.neighbours) return make("p", { id: "around", textContent: "To see neighbours and hardest negatives, start again with --serve --neighbours 12; it encodes all samples once." });
  const status = make("p", { textContent: "comparing with all samples…", set: { role: "status" } });
  const place = make("section", { id: "around" }, ...Array.from({ length: about.pairs ? 4 : 2 }, () => make("section")));
  place.firstChild.append(status);
  compared = compared.then(async () => {
    if (!place.isConnected) return;  // the reader has gone on
    const { lists } = await (await ask(`neighbours/${id}`)).json();
    place.replaceChildren(...lists.map(({ title, words, samples }) => make("section", {}, make("h3", { textContent: title }),
      make("p", { textContent: words }), make("ol", { className: "cards" }, ...samples.map(neighbour)))));
  }).catch((error) => Object.assign(status, { textContent: error.message, className: "error" }));
  return place;
}

function neighbour(sample) {
  return make("li", { className: "card" }, opener(sample.id), `${sample.id}`, make("small", { textContent: sample.figures }), ...texts(sample));
}

/** Two augmented views, which a button draws again for the next epoch. */
function views(id) {
  let epoch = 0;
  const image = make("img", { alt: "two augmented views" }), label = make("span");
  const draw = () => {
    image.src = `views/${id}?epoch=${epoch}`;
    label.textContent = `two views, epoch ${epoch++} `;
  };
  draw();
  return make("figure", {}, image, make("figcaption", {}, label, make("button", { type: "button", textContent: "Next epoch", onclick: draw })));
}

/** A line of tau over the snapshots for each side, under its range. */
function past(history) {
  const values = history.flatMap(({ tau }) => Object.values(tau)).filter((value) => value !== null);
  if (history.length < 2 || !values.length) return [];
  const [low, high] = [Math.min(...values), Math.max(...values)], steps = history.map(({ step }) => step);
  const across = (step) => 100 * (step - steps[0]) / (steps.at(-1) - steps[0] || 1);
  const label = `tau from ${history[0].tag} to ${history.at(-1).tag}, between ${number(low)} and ${number(high)}`;
  const lines = about.sides.map((side, place) => make("polyline", { set: { class: place ? "second" : "first",
    points: history.filter(({ tau }) => tau[side] !== null)
      .map(({ step, tau }) => `${across(step)},${38 - 36 * (tau[side] - low) / (high - low || 1)}`).join(" ") } }));
  const svg = make("svg", { set: { viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img", "aria-label": label } }, ...lines);
  return [make("figure", {}, svg, make("figcaption", { textContent: `${label}${about.sides.length > 1 ? `; blue ${about.sides[0]}, orange ${about.sides[1]}` : ""}` }))];
}

const begin = reportingErrors(async () => {
  about = await (await ask("about")).json();
  one("#run").textContent = document.title = about.run;
  one("#facts").textContent = `${about.samples.toLocaleString("en")} samples at ${about.snapshot}`;
  one("#notes").replaceChildren(...about.notes.map((note) => make("li", { textContent: note })));
  one("#classes").replaceChildren(...about.classes.map((value) => make("option", { value })));
  const kinds = Object.entries(about.kinds).map(([value, count]) => make("option", { value, textContent: `${words(value)} (${count.toLocaleString("en")})` }));
  fields.kind.replaceChildren(make("option", { value: "", textContent: "all" }), ...kinds);
  fields.side.replaceChildren(...about.sides.map((value) => make("option", { value, textContent: value })));
  fields.side.closest("label").hidden = about.sides.length < 2;
  const [misfits, margin] = ["misfits", "margin"].map((value) => fields.sort.querySelector(`[value=${value}]`));
  if (!about.ranked) misfits.remove();
  if (!about.pairs) margin.remove();
  if (!about.negatives) Object.assign(margin, { disabled: true, textContent: "lowest margin: needs --neighbours" });
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
one("#close").addEventListener("click", () => dialog.close());
one("#previous").addEventListener("click", () => go(-1));
one("#next").addEventListener("click", () => go(1));
dialog.addEventListener("close", () => one(`#samples [data-id="${open}"]`)?.closest("li").querySelector("button").focus());
document.addEventListener("keydown", (event) => {
  const other = event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || event.target.closest("input, ol");
  if (!dialog.open || other || !STEPS[event.key]) return;  // in a list of neighbours, arrows scroll it
  event.preventDefault();
  go(STEPS[event.key]);
});
begin();
