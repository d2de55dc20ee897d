// Waits for the others, sends replies without loading the page, and adds buttons to the steppers. Without it forms do.
"use strict";

const table = document.getElementById("table");
const away = document.getElementById("away"); // says that the server does not answer
let news = null; // the server's events, while others are waited for
let late = null; // until it is said that they do not come
let fresh = 0; // when something was chosen, or other choices were shown; at first, when the page was asked for
const KEY = 300, ROW = 1000; // milliseconds after that in which a key, or a later click of a row, is a stray one

function show(html, focus) {
  const text = document.getElementById("text");
  const draft = text ? text.value : "";
  table.innerHTML = html; // made by our own server, with every text escaped
  prepare();
  const next = document.getElementById("text");
  if (next && !focus) next.value = draft;
  const now = document.getElementById("now"); // the button that stops the game is never chosen for anybody
  (now.querySelector(".reply textarea, .reply button, .ending button, a.main") || now).focus({ preventScroll: true });
  now.scrollIntoView({ block: "nearest" });
  fresh = performance.now();
}

function prepare() {
  for (const input of table.querySelectorAll(".stepper input")) {
    for (const step of [-1, 1]) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = step < 0 ? "−" : "+";
      button.setAttribute("aria-label", (step < 0 ? "fewer " : "more ") + input.name);
      button.addEventListener("click", () => { step < 0 ? input.stepDown() : input.stepUp(); worth(input.form); });
      if (step < 0) input.before(button); else input.after(button);
    }
    input.addEventListener("input", () => worth(input.form));
  }
  for (const form of table.querySelectorAll("form.reply")) form.addEventListener("submit", send);
  const text = document.getElementById("text");
  if (text) text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); text.form.requestSubmit(); }
  });
  const claim = table.querySelector("dialog"), opener = document.getElementById("claims");
  if (claim) {
    claim.close(); // without this script it stands open among the rest
    for (const button of table.querySelectorAll("[data-claim]")) button.hidden = false;
    opener.addEventListener("click", () => { claim.showModal(); worth(claim.querySelector("form")); });
    claim.querySelector("[data-claim]").addEventListener("click", () => claim.close());
  }
  const state = table.querySelector(".state").dataset;
  if (state.state === "waiting" && !news) wait(state.version);
}

function worth(form) {
  let points = 0;
  for (const input of form.querySelectorAll("input[data-worth]")) points += Number(input.value) * Number(input.dataset.worth);
  form.querySelector(".worth").textContent = "worth " + points + (points === 1 ? " point" : " points") + " to you";
}

async function send(event) {
  event.preventDefault();
  const body = new URLSearchParams(new FormData(event.target, event.submitter));
  for (const button of table.querySelectorAll("button")) button.disabled = true;
  let answer = null; // a reply that is sent twice counts once
  while (!(answer = await fetch(event.target.action, { method: "POST", body, headers: { "x-script": "1" } }).catch(() => null))) {
    away.hidden = false;
    await new Promise((later) => setTimeout(later, 1000));
  }
  away.hidden = true;
  if (answer.redirected) location.reload(); // the token is asked for again
  else if (answer.ok || answer.status === 400) show(await answer.text(), answer.ok);
  else { alert(await answer.text()); location.reload(); }
}

function wait(version) {
  news = new EventSource(table.dataset.live + "?since=" + version);
  news.onmessage = (event) => {
    const html = JSON.parse(event.data), done = !html.includes('data-state="waiting"');
    if (done) { news.close(); news = null; }
    show(html, done);
  };
  news.onopen = () => { clearTimeout(late); late = null; away.hidden = true; };
  news.onerror = () => { // the browser asks again by itself, unless it has given up
    late ??= setTimeout(() => { away.hidden = false; }, 2000);
    if (news.readyState === EventSource.CLOSED) setTimeout(wait, 1000, version);
  };
}

// The second half of a double click, or a key that is held or comes at once, was meant for what stood there before.
function stray(event) {
  if (!event.target.closest("a, button:not([type])")) return;
  const since = performance.now() - fresh; // who clicks on and on is heard again after a second
  const early = event.detail === 0 ? fresh > 0 && since < KEY : event.detail > 1 && since < ROW; // 0: by key
  if (event.type === "click" ? early : event.repeat && event.key === "Enter") event.preventDefault();
  else if (event.type === "click") fresh = performance.now();
}

document.addEventListener("click", stray);
document.addEventListener("keydown", stray);
if (table) prepare();

const again = document.getElementById("again"); // a place in the queue
if (again) setTimeout(() => again.requestSubmit(), 4000);

const curves = document.getElementById("curves");
if (curves) setInterval(async () => { // also of a run that is new, or silent for long: it may go on
  if (document.hidden || curves.querySelector(".state").dataset.state === "finished") return;
  const answer = await fetch(curves.dataset.curves).catch(() => null);
  if (answer && answer.ok) curves.innerHTML = await answer.text();
}, 5000);

// The moments of a recorded game: a slider over them, the map, who saw what, and beliefs as bars.
const timeline = document.querySelector("[data-timeline]");
if (timeline) showTimeline(timeline, JSON.parse(timeline.dataset.timeline));

function made(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = className;
  return element;
}

function named(tag, who) {
  const element = made(tag, who), hue = made("i", "", "hue");
  hue.style.background = who.toLowerCase();
  element.prepend(hue);
  return element;
}

function showTimeline(section, { width, rooms, bars, moments }) {
  const slider = section.querySelector("input"), cells = [], drawn = [];
  const believed = section.querySelector(".believed"), saw = section.querySelector(".saw");
  rooms.forEach((room, i) => {
    const rows = section.querySelector(".map tbody");
    if (i % width === 0) rows.append(made("tr"));
    cells.push(made("td"));
    rows.lastChild.append(cells[i]);
  });
  for (const bar of bars) { // each stays in the page, so that it moves
    const row = made("div", "", "belief"), whole = made("div", "", "whole");
    whole.setAttribute("role", "img");
    row.append(rooms.length ? named("span", bar.who) : made("span", bar.who + ", " + bar.asks), whole, made("b"));
    bar.answers.forEach((answer, i) => whole.append(made("span", answer, bar.truth.includes(i) ? "true" : "")));
    drawn.push(row);
    believed.querySelector(".bars").append(row);
  }
  const draw = () => {
    const now = moments[slider.value], probs = new Map(now.beliefs);
    section.querySelector(".told").textContent = now.title + (now.text ? ": " + now.text : "");
    slider.setAttribute("aria-valuetext", now.title);
    cells.forEach((cell, i) => {
      cell.replaceChildren(made("small", rooms[i]));
      for (const [who, where] of Object.entries(now.at)) if (where === i) cell.append(named("span", who));
      for (const [who, where] of Object.entries(now.bodies)) if (where === i) cell.append(named("s", who));
    });
    believed.hidden = !probs.size;
    drawn.forEach((row, i) => {
      row.hidden = !probs.has(i);
      if (row.hidden) return;
      const given = probs.get(i), whole = row.querySelector(".whole");
      given.forEach((p, k) => {
        whole.children[k].style.width = 100 * p + "%";
        whole.children[k].classList.toggle("thin", p * whole.clientWidth < 7 * bars[i].answers[k].length + 3); // no room
      });
      const right = bars[i].truth.reduce((sum, k) => sum + given[k], 0);
      row.querySelector("b").textContent = right.toFixed(2);
      whole.setAttribute("aria-label", bars[i].answers.map((answer, k) => answer + " " + given[k].toFixed(2)).join(", "));
    });
    if (saw) {
      saw.hidden = !now.saw.length;
      saw.querySelector("tbody").replaceChildren(...now.saw.map((each) => {
        const row = made("tr");
        row.append(named("td", each.who), made("td", each.where), made("td", each.saw.join(", ") || "nobody"), made("td", each.did));
        return row;
      }));
    }
    for (const turn of document.querySelectorAll(".turn.current")) turn.classList.remove("current");
    if (now.mark) document.getElementById(now.mark)?.classList.add("current");
  };
  const go = () => { // to the message that the address names
    const at = moments.findIndex((moment) => moment.mark && "#" + moment.mark === location.hash);
    if (at >= 0) slider.value = at;
    draw();
  };
  slider.addEventListener("input", draw);
  for (const button of section.querySelectorAll("[data-go]")) button.addEventListener("click", () => {
    Number(button.dataset.go) < 0 ? slider.stepDown() : slider.stepUp();
    draw();
  });
  window.addEventListener("hashchange", go);
  section.hidden = false;
  go();
  if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView(); // which this section moved down
}
