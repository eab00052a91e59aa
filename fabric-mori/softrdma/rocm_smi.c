/* One GPU for rocm_smi's callers, on a host that has none: MoRI ends the process without a GPU, also
 * where all KV is in memory of the host. The functions are those that MoRI looks up, as
 * rocm_smi/rocm_smi.h declares them; nothing else of the GPU is there. */
#include <stdbool.h>
#include <stdint.h>

enum { SUCCESS = 0, INVALID = 1 };

int rsmi_init(uint64_t flags) {
  (void)flags;
  return SUCCESS;
}

int rsmi_shut_down(void) { return SUCCESS; }

int rsmi_num_monitor_devices(uint32_t *count) {
  *count = 1;
  return SUCCESS;
}

/* PCI address 0000:00:00.0. */
int rsmi_dev_pci_id_get(uint32_t device, uint64_t *address) {
  *address = 0;
  return device == 0 ? SUCCESS : INVALID;
}

/* There is no pair of GPUs. */
int rsmi_is_P2P_accessible(uint32_t from, uint32_t to, bool *accessible) {
  (void)from;
  (void)to;
  *accessible = false;
  return SUCCESS;
}

int rsmi_topo_get_link_type(uint32_t from, uint32_t to, uint64_t *hops, int *type) {
  (void)from;
  (void)to;
  (void)hops;
  (void)type;
  return INVALID;
}

int rsmi_topo_get_link_weight(uint32_t from, uint32_t to, uint64_t *weight) {
  (void)from;
  (void)to;
  (void)weight;
  return INVALID;
}

int rsmi_status_string(int status, const char **text) {
  *text = status == SUCCESS ? "success" : "there is one GPU, which is none";
  return SUCCESS;
}
