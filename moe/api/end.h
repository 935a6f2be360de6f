#ifdef __cplusplus
}
#endif

#pragma pop_macro("I")
