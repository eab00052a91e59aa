/* For machines without ROCm: all that MoRI's IO headers take from HIP is the size of this handle. */
#ifndef KF_HIP_STAND_IN
#define KF_HIP_STAND_IN
typedef struct hipIpcMemHandle_st { char reserved[64]; } hipIpcMemHandle_t;
#endif
