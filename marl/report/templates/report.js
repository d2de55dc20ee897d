"use strict";
// Marks the section that is read in the contents.
const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
const watch = new IntersectionObserver((seen) => {
  const here = seen.find((each) => each.isIntersecting);
  if (!here) return;
  links.forEach((link) => link.removeAttribute("aria-current"));
  const link = links.get(here.target.id);
  link.setAttribute("aria-current", "true");
  link.parentElement.scrollTo({ left: link.offsetLeft - 40 });
}, { rootMargin: "-20% 0px -80% 0px" });
document.querySelectorAll("section").forEach((section) => watch.observe(section));

// Shows the games of one arm that fit, beside another arm's.
const form = document.querySelector("form.filter");
const list = document.querySelector(".games");
const games = list ? [...list.children] : [];
function filter() {
  const wanted = Object.fromEntries(new FormData(form));
  const played = (game) => [...game.querySelectorAll("article")].find((each) => each.dataset.arm === wanted.arm);
  const moved = (game) => Number(played(game)?.dataset.moved ?? -Infinity);
  const fits = (game) => played(game) && ["ending", "named"].every(
    (name) => !wanted[name] || wanted[name] === played(game).dataset[name]);
  for (const game of games) {
    game.hidden = !fits(game);
    for (const part of game.querySelectorAll("[data-arm]"))
      part.hidden = ![wanted.arm, wanted.beside].includes(part.dataset.arm);
  }
  list.append(...(wanted.order ? [...games].sort((a, b) => moved(b) - moved(a)) : games));
  const shown = games.filter((game) => !game.hidden).length;
  form.querySelector("output").textContent = shown ? `${shown} of ${games.length} games` : "No game fits.";
}
if (form) {
  form.hidden = false;
  form.addEventListener("change", filter);
  filter();
}
