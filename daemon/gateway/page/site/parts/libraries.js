// The vendored libraries as a module. They are classic scripts, which index.html loads before this.

export const { h, render, Fragment } = window.preact;
export const { useState, useEffect, useLayoutEffect, useRef, useMemo, useReducer } = window.preactHooks;
export const html = window.htm.bind(h);
export const uPlot = window.uPlot;
