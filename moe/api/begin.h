/* Opens a public header and the implementation; end.h closes them. There is no guard: both are included each time.
   Between them macros of other headers that have our names are undefined. */
#pragma push_macro("I") /* <complex.h>. Here it is the intermediate size */
#undef I

#ifdef __cplusplus
extern "C" {
#endif
