//! The loop over tiles of head rows × digit rows, which every ISA multiplies in its registers.

/// Calls `$tile::<H, X, FIRST>` for all tiles from head row `$first` on. Most tiles have `$height` head
/// rows and `$width` digit rows. All tiles of some head rows prefetch the next ones, each a part of them: the requests of
/// the first tile alone would be more than memory answers in its time.
macro_rules! tiles {
    ($tile:ident, $height:literal by $width:literal, $first:expr, $rows:ident, $digits:ident, $len:ident, $out:ident) => {{
        let (r, n) = ($rows.len() / $len, $digits.len() / $len);
        let mut row = $first;
        while row < r {
            let height = if r - row >= $height { $height } else { 1 };
            let mut x = 0;
            while x < n {
                let from = $rows.as_ptr().add(row * $len);
                let digits = $digits.as_ptr().add(x * $len);
                let to = $out.as_mut_ptr().add(x * r + row);
                // The head rows that a tile of so many digit rows prefetches.
                let next =
                    |width: usize| height + x * height / n..height + (x + width) * height / n;
                x += match (height, n - x, x) {
                    ($height, $width.., 0) => {
                        $tile::<$height, $width, true>(from, digits, $len, to, r, next($width))
                    }
                    ($height, $width.., _) => {
                        $tile::<$height, $width, false>(from, digits, $len, to, r, next($width))
                    }
                    ($height, 2.., 0) => {
                        $tile::<$height, 2, true>(from, digits, $len, to, r, next(2))
                    }
                    ($height, 2.., _) => {
                        $tile::<$height, 2, false>(from, digits, $len, to, r, next(2))
                    }
                    ($height, _, 0) => {
                        $tile::<$height, 1, true>(from, digits, $len, to, r, next(1))
                    }
                    ($height, _, _) => {
                        $tile::<$height, 1, false>(from, digits, $len, to, r, next(1))
                    }
                    (_, 4.., _) => $tile::<1, 4, true>(from, digits, $len, to, r, next(4)),
                    _ => $tile::<1, 1, true>(from, digits, $len, to, r, next(1)),
                };
            }
            row += height;
        }
    }};
}

pub(super) use tiles;
