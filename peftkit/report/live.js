// Asks the server every few seconds, and puts in what is new; focus and place on the page stay.
let version = "";
async function renew() {
  try {
    const answer = await fetch("/", {cache: "no-store", headers: {"If-None-Match": version}});
    if (answer.status === 200) {
      const focused = [...document.querySelectorAll(".plot")].indexOf(document.activeElement);
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      version = answer.headers.get("ETag");
      document.title = fresh.title;
      document.body.replaceChildren(...fresh.body.querySelectorAll(":scope > :not(script)"));
      document.querySelectorAll(".plot").forEach(read);
      if (focused >= 0) document.querySelectorAll(".plot")[focused]?.focus({preventScroll: true});
    }
    delete document.body.dataset.alone;
  } catch {
    document.body.dataset.alone = "";
  }
  setTimeout(renew, 3000);
}
renew();
