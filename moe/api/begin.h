/* Opens a public header, as end.h closes it: no guard, they are included each time. Macros of other headers whose names
   are ours are out of the way in between. */
#pragma push_macro("I") /* <complex.h>; here it is the intermediate size. (Who needs both undefines one of them.) */
#undef I

#ifdef __cplusplus
extern "C" {
#endif
