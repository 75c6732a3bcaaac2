// Which words of two texts differ: the words outside of their longest common subsequence.

const MAX_WORDS = 2000; // of each text; the table of the search has their product

// Returns for each text its parts as {text, isDifferent}.
export function differences(one, other) {
  const [a, b] = [wordsOf(one), wordsOf(other)];
  if (a.length > MAX_WORDS || b.length > MAX_WORDS) return [[{ text: one }], [{ text: other }]];
  const width = b.length + 1;
  const common = new Uint16Array((a.length + 1) * width); // lengths for the rests of both
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      const below = common[(i + 1) * width + j];
      const right = common[i * width + j + 1];
      common[i * width + j] = a[i] === b[j] ? common[(i + 1) * width + j + 1] + 1 : Math.max(below, right);
    }
  }
  const found = [[], []];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      found[0].push({ text: a[i], isDifferent: false });
      found[1].push({ text: b[j], isDifferent: false });
      i += 1;
      j += 1;
    } else if (j >= b.length || (i < a.length && common[(i + 1) * width + j] >= common[i * width + j + 1])) {
      found[0].push({ text: a[i], isDifferent: true });
      i += 1;
    } else {
      found[1].push({ text: b[j], isDifferent: true });
      j += 1;
    }
  }
  return found;
}

// Words and the text between them.
function wordsOf(text) {
  return text.match(/\s+|[^\s]+/g) ?? [];
}
